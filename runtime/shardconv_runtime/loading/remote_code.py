"""Classes of models whose code is in the converted directory."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..errors import PlanError


def remote_class(directory: Path, class_name: str) -> type[nn.Module]:
    """Import a class from Python code in a directory.

    Raises:
        PlanError: the code is in another repository.
    """
    reference = class_name.replace(":", ".")
    if "--" in reference:
        raise PlanError(f"{directory}: the model class {reference!r} is code of another repository")
    found: type[nn.Module] = get_class_from_dynamic_module(reference, str(directory), local_files_only=True)
    return found
