"""From the user's model to a ``ModelSpec``; models that cannot be converted are refused early."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from ..errors import OptionError, SourceError
from ..files.small_files import choose_files, sizes_in
from ..format.header import dtype_name
from ..hub_options import Hub
from ..meta.meta_model import class_name_of, is_custom, meta_twin, refuse_other_models
from ..storage.file_access import WeightFile, name_in
from .config_reading import model_class_of, read_config
from .model_directory import (
    Index,
    index_of,
    refuse_other_kinds,
    weight_files,
)
from .model_location import locate
from .quantized import quantization_of, require_supported, without_quantization
from .stored_leaves import stored_dtype, validate


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
    """The index of the checkpoint files, if there are several."""
    tied: Mapping[str, str] | None = None
    """Alias -> first name of parameters that are one tensor in the checkpoint or in a plan; None: all that
    the class and its config tie."""
    quantization: Mapping[str, Any] | None = None
    """The ``quantization_config`` of a quantized checkpoint; ``config`` describes the unquantized model."""
    dequantize: bool = False
    """Convert such a checkpoint to unquantized weights."""
    sizes: Mapping[str, int] | None = None
    """The files of a Hub repository -> bytes; None for those of the directory."""
    twin: nn.Module | None = None
    """The model on meta, if the caller has it in memory; it is copied, where others are built."""

    @property
    def class_name(self) -> str:
        """Return ``module:Class`` of the model."""
        return class_name_of(self.model_class)


DTYPES = ("float64", "float32", "bfloat16", "float16")


def resolve(
    model: str | os.PathLike[str] | Any,
    hub: Hub | None = None,
    *,
    trust_remote_code: bool = False,
    dtype: str | None = None,
    need_weights: bool = True,
    stream: bool = False,
) -> ModelSpec:
    """Find the model, its class, its dtype and, if they are needed, its weight files.

    Args:
        dtype: the dtype of the parameters; by default the config's dtype, otherwise the checkpoint's.
    """
    if dtype is not None and dtype.removeprefix("torch.") not in DTYPES:
        raise OptionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if isinstance(model, nn.Module):
        return _from_module(model, dtype, need_weights=need_weights)
    if isinstance(model, transformers.PreTrainedConfig):
        return _from_config(model, dtype, trust_remote_code=trust_remote_code, need_weights=need_weights)
    hub = hub or Hub()
    located = locate(model, hub, code=trust_remote_code, need_weights=need_weights, stream=stream)
    directory = located.directory
    if located.commit is not None:  # ``locate`` has checked the kind of others
        refuse_other_kinds(directory, need_weights=need_weights and not located.remote)
    config = read_config(directory, trust_remote_code=trust_remote_code)
    quantization = quantization_of(config)
    if quantization is not None:
        require_supported(quantization, str(directory), dequantize=dtype is not None)
        config = without_quantization(config)
    files: tuple[WeightFile, ...] = located.remote or (weight_files(directory) if need_weights else ())
    validate(files)
    index = index_of(directory) if files else None
    model_class = model_class_of(config, directory, trust_remote_code=trust_remote_code)
    return ModelSpec(
        name=os.fspath(model),
        config=config,
        model_class=model_class,
        dtype=_dtype(dtype, config, files, {} if index is None else index.metadata),
        trust_remote_code=is_custom(model_class),
        directory=directory,
        revision=located.commit,
        weight_files=files,
        index=index,
        quantization=quantization,
        dequantize=quantization is not None and dtype is not None,
        sizes=located.sizes,
    )


def files_left_out(spec: ModelSpec) -> dict[str, str]:
    """Return the files of a model that are neither its weights nor copied with them -> why."""
    if spec.directory is None:
        return {}
    weights = {name_in(spec.directory, file) for file in spec.weight_files}
    sizes = sizes_in(spec.directory) if spec.sizes is None else spec.sizes
    left_out = choose_files(sizes, code=spec.trust_remote_code).left_out
    return {path: why for path, why in left_out.items() if path not in weights}


def _from_config(config: Any, dtype: str | None, *, trust_remote_code: bool, need_weights: bool) -> ModelSpec:
    name = type(config).__name__
    if need_weights:
        raise SourceError(f"a config object ({name}) has no weights; name a directory or a Hub id")
    quantization = quantization_of(config)
    if quantization is not None:
        require_supported(quantization, name, dequantize=dtype is not None)
        config = without_quantization(config)
    model_class = model_class_of(config, None, trust_remote_code=trust_remote_code)
    return ModelSpec(
        name=name,
        config=config,
        model_class=model_class,
        dtype=_dtype(dtype, config, (), {}),
        trust_remote_code=is_custom(model_class),
        quantization=quantization,
    )


def _from_module(model: nn.Module, dtype: str | None, *, need_weights: bool) -> ModelSpec:
    name = type(model).__name__
    if need_weights:
        raise SourceError(f"a model in memory ({name}) is not converted; name a directory or a Hub id")
    if dtype is not None:
        raise OptionError(f"a model in memory ({name}) has its dtype; cast it, and leave out dtype=")
    refuse_other_models(model)
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return ModelSpec(
        name=name,
        config=getattr(model, "config", None),
        model_class=type(model),
        dtype=dtype_name(dtypes[0] if dtypes else "float32"),
        trust_remote_code=is_custom(type(model)),
        twin=meta_twin(model),
    )


def _dtype(asked: str | None, config: Any, files: tuple[WeightFile, ...], metadata: Mapping[str, Any]) -> str:
    """Return the dtype in which ``from_pretrained`` loads the model: given, the config's, or the weights'."""
    if asked is not None:
        return asked.removeprefix("torch.")
    said = getattr(config, "dtype", None) or metadata.get("dtype")
    name = str(said) if said else files and stored_dtype(files[0])
    if not name and not files and hasattr(config, "get_text_config"):  # a guess, if no weights say it
        name = getattr(config.get_text_config(), "dtype", None)
    return dtype_name(name or "float32")
