"""What is known of the model to convert before anything of it is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .weight_files import WeightFile


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that can be built, and, where ``weight_files`` is not empty, filled."""

    name: str
    """What the user called it: a path, a Hub id, or the config's class."""
    config: Any
    """The transformers config object. Copy it before changing anything."""
    model_class: type
    """The concrete class; ``model_class(config)`` builds the model."""
    dtype: str
    """Default dtype of the parameters, as ``"bfloat16"``."""
    trust_remote_code: bool = False
    """The class is the repository's own code, which the user trusts; False for classes of transformers."""
    directory: Path | None = None
    """Local directory with ``config.json``; None where the model was given as a config object."""
    revision: str | None = None
    """Commit of a Hub repository; None for local directories."""
    weight_files: tuple[WeightFile, ...] = ()
    """Checkpoint files, validated; empty where no weights were asked for."""
    blocks: tuple[int, int] | None = None
    """Of a block-scaled float8 checkpoint: rows and columns of a block. ``config`` is the plain model's."""
    dequantize: bool = False
    """Convert such a checkpoint without its blocks."""

    @property
    def class_name(self) -> str:
        """``module:Class`` of the model.

        Custom code is imported by transformers under a name that depends on where the directory lies;
        its module is therefore given relative to the directory: ``modeling_custom:CustomModel``.
        """
        module = self.model_class.__module__
        if is_custom(self.model_class):
            module = module.rpartition(".")[2]
        return f"{module}:{self.model_class.__qualname__}"


def is_custom(cls: type) -> bool:
    """Whether transformers imported the class from a model repository."""
    return cls.__module__.startswith("transformers_modules.")
