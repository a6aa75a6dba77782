"""The description of a model to convert, known before the model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .weight_files import Index, WeightFile


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that can be built and, if it has ``weight_files``, filled."""

    name: str
    """The user's path or Hub id, or the config's class."""
    config: Any
    """The transformers config object; to be copied before it is changed."""
    model_class: type
    """The concrete class; ``model_class(config)`` builds the model."""
    dtype: str
    """Default dtype of the parameters, such as ``"bfloat16"``."""
    trust_remote_code: bool = False
    """The class is the repository's own code, which the user trusts; False for classes of transformers."""
    directory: Path | None = None
    """Local directory with ``config.json``; None for a model given as a config object."""
    revision: str | None = None
    """Commit of a Hub repository; None for local directories."""
    weight_files: tuple[WeightFile, ...] = ()
    """Validated checkpoint files; empty if no weights are needed."""
    index: Index | None = None
    """Of the checkpoint files, where there are several."""
    tied: Mapping[str, str] | None = None
    """Alias -> first name of parameters that are one tensor, by the checkpoint or by a plan; None: all that
    the class and its config tie."""
    quantization: Mapping[str, Any] | None = None
    """The ``quantization_config`` of a quantized checkpoint; ``config`` is that of the unquantized model."""
    dequantize: bool = False
    """Convert such a checkpoint to unquantized weights."""

    @property
    def class_name(self) -> str:
        """``module:Class`` of the model.

        transformers imports custom code under a name that depends on the directory's path; its module is
        therefore relative to the directory: ``modeling_custom:CustomModel``.
        """
        module = self.model_class.__module__
        if is_custom(self.model_class):
            module = module.rpartition(".")[2]
        return f"{module}:{self.model_class.__qualname__}"


def is_custom(cls: type) -> bool:
    """Whether transformers imported the class from a model repository."""
    return cls.__module__.startswith("transformers_modules.")
