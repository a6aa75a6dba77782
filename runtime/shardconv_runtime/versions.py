"""The version of both packages and of the libraries that a manifest records; functions of the converter.

The packages also run from a clone that is not installed, which has no metadata to ask. So the version is a
constant here, and both ``pyproject.toml`` take it from this file.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from .errors import MissingPackageError

__version__ = "0.1.0"

CONVERTER = "shardconv_runtime.converter"
"""The group of entry points under which the converter declares the functions that the runtime calls."""


def converter_function(name: str, purpose: str, remedy: str = "") -> Any:
    """Return a function of the converter, which is its own distribution and may be missing."""
    for entry_point in entry_points(group=CONVERTER, name=name):
        return entry_point.load()
    raise MissingPackageError(
        f"{purpose}, which needs the package shardconv; install it from the repository that "
        f"shardconv-runtime came from (pip install .){remedy}"
    )


def tool_versions() -> dict[str, str]:
    """Return the versions of the packages that write a converted directory, for its manifest."""
    # Imported here, since the command line answers without torch.
    libraries = ("torch", "transformers", "safetensors")
    return {"shardconv": __version__} | {name: str(import_module(name).__version__) for name in libraries}
