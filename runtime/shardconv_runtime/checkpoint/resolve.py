"""From the user's model to a ``ModelSpec``: what can be refused early is refused here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import transformers

from ..errors import SourceError
from ..hub_options import Hub
from .locate import locate
from .model_spec import ModelSpec, is_custom
from .other_kinds import refuse_other_kinds
from .quantized import quantization_of, require_supported, without_quantization
from .source_config import model_class_of, read_config
from .weight_files import WeightFile, index_of, stored_dtype, validate, weight_files

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
        model: a directory, a Hub id, or (without weights) a transformers config object.
        hub: how to download it; None for the defaults.
        trust_remote_code: import the repository's own Python code.
        dtype: of the parameters; by default that of the config, else that of the checkpoint.
        need_weights: find (and download) the weight files and validate them.
        stream: leave uncached weight files on the Hub, where they are read by ranges.

    Raises:
        SourceError: the model cannot be used; the message names the problem and the remedy.
    """
    if dtype is not None and dtype.removeprefix("torch.") not in DTYPES:
        raise SourceError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if isinstance(model, transformers.PreTrainedConfig):
        return _from_config(model, dtype, trust_remote_code=trust_remote_code, need_weights=need_weights)
    hub = hub or Hub()
    located = locate(model, hub, code=trust_remote_code, need_weights=need_weights, stream=stream)
    directory = located.directory
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
    )


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


def _dtype(asked: str | None, config: Any, files: tuple[WeightFile, ...], metadata: Mapping[str, Any]) -> str:
    """The dtype in which ``from_pretrained`` loads the model: asked for, or the config's, or the weights'."""
    if asked is not None:
        return asked.removeprefix("torch.")
    said = getattr(config, "dtype", None) or metadata.get("dtype")
    found = str(said) if said else files and stored_dtype(files[0])
    if not found and not files and hasattr(config, "get_text_config"):  # a guess, where no weights say it
        found = getattr(config.get_text_config(), "dtype", None)
    return str(found or "float32").removeprefix("torch.")
