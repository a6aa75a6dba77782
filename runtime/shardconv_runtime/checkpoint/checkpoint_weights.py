"""Which bytes of the checkpoint each parameter of a model is made of, as transformers itself would load it.

transformers renames, stacks, splits and transposes what a checkpoint holds on the way to a
parameter; its own ``from_pretrained`` does it here, on tensors that only record it, so that all of it
applies and no weight is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import SourceError, brief
from ..format.block_scales import SUFFIX
from ..format.names import natural_key
from ..tensors.lazy_tensor import LazyTensor
from .model_spec import ModelSpec
from .quantized import Scaled, Scales, dequantized_tensors, factors_in
from .recorded import InPlaceError, RecordedTensor, lazy_of, recording, small_ones_read
from .stored_leaves import lazy_tensors

SHOWN = 3
"""How many names an error lists."""

_UNCONVERTED = re.compile(r"^(\S+) +\| +(?:\x1b\[\d+m)?CONVERSION", re.MULTILINE)
"""A row of transformers' loading report."""


def lazy_weights(spec: ModelSpec) -> dict[str, LazyTensor | Scaled]:
    """The tensors of all parameters and persistent buffers, global, by FQN; tied ones under each name.

    Those of a block-scaled checkpoint are values with factors, unless it is to be dequantized.

    Args:
        spec: a model with a directory.

    Raises:
        SourceError: a tensor is missing from the checkpoint, not used by the model, or of another shape.
    """
    tensors = lazy_tensors(spec.weight_files)
    factors = {} if spec.blocks is None else factors_in(tensors, spec.blocks)
    plain = _plain(spec, tensors, factors)
    model, info = _load(spec, plain)
    _require_shapes(spec, info["mismatched_keys"])
    _require_all(spec, info["missing_keys"])
    _refuse_extra(spec, info["unexpected_keys"])
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state: dict[str, torch.Tensor] = model.state_dict()
    drawn = _drawn(spec, plain, {name: state[name] for name in parameters & state.keys()})
    weights = {name: None if name in drawn else lazy_of(tensor) for name, tensor in state.items()}
    _require_all(spec, [name for name, lazy in weights.items() if lazy is None])
    found = {name: lazy for name, lazy in weights.items() if lazy is not None}
    if spec.blocks is None or spec.dequantize:
        return dict(found)
    scales = Scales(tensors, factors, spec.blocks)
    return {name: scales.of(name, lazy) or lazy for name, lazy in found.items()}


def select(
    spec: ModelSpec, weights: Mapping[str, LazyTensor | Scaled], names: Collection[str]
) -> dict[str, LazyTensor | Scaled]:
    """The weights that a plan names.

    Raises:
        SourceError: the model has no such weight.
    """
    absent = sorted(set(names) - weights.keys())
    if absent:
        raise SourceError(
            f"the model of {spec.name} has no {_some(absent)}, which the plan names; plan it again"
        )
    return {name: weights[name] for name in names}


def _plain(
    spec: ModelSpec, tensors: Mapping[str, LazyTensor], factors: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """The checkpoint as one of the model without quantization."""
    if spec.blocks is not None and spec.dequantize:
        return dequantized_tensors(tensors, factors, spec.blocks, spec.dtype)
    scales = {name + SUFFIX for name in factors}
    return {name: tensor for name, tensor in tensors.items() if name not in scales}


def _drawn(
    spec: ModelSpec, tensors: Mapping[str, LazyTensor], parameters: Mapping[str, torch.Tensor]
) -> set[str]:
    """Parameters that the checkpoint lacks, as it may by the model's code, but that are drawn at random.

    Others, a table of sines, say, have the same values each time the model is loaded.
    """
    made = {name: value for name, value in parameters.items() if not isinstance(value, RecordedTensor)}
    if not made:
        return set()
    again = _load(spec, tensors)[0].state_dict()
    return {name for name, value in made.items() if not torch.equal(value, again[name])}


def _load(spec: ModelSpec, tensors: Mapping[str, LazyTensor]) -> tuple[Any, dict[str, Any]]:
    """The model, as transformers loads it, and its report.

    Some models' code writes into parameters once they are loaded: small ones then are read, and it may.
    """
    try:
        return _load_from(spec, tensors)
    except InPlaceError:
        pass
    try:
        return _load_from(spec, small_ones_read(tensors))
    except InPlaceError as error:
        raise SourceError(f"the weights of {spec.name} cannot be read: {error}, a large one") from error


def _load_from(
    spec: ModelSpec, tensors: Mapping[str, LazyTensor | torch.Tensor]
) -> tuple[Any, dict[str, Any]]:
    reports: list[str] = []
    try:
        with _loading_reports() as reports, recording(tensors) as checkpoint:
            loaded: tuple[Any, dict[str, Any]] = spec.model_class.from_pretrained(  # type: ignore[attr-defined]
                None,
                config=spec.config,
                state_dict=checkpoint,
                dtype=getattr(torch, spec.dtype),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (SourceError, InPlaceError):
        raise
    except Exception as error:  # unpicklers, converters and custom code may raise anything
        _require_converted(spec, reports, error)
        raise SourceError(f"the weights of {spec.name} cannot be read: {brief(error)}") from error
    return loaded


def _require_converted(spec: ModelSpec, reports: list[str], error: Exception) -> None:
    """Name the parameters that cannot be put together, which only transformers' log says."""
    names = [match[1] for report in reports for match in _UNCONVERTED.finditer(report)]
    if names:
        raise SourceError(
            f"the checkpoint of {spec.name} does not hold all that these are put together from, or not in "
            f"matching shapes: {_some(names)}; download it again, or correct config.json"
        ) from error


@contextmanager
def _loading_reports() -> Iterator[list[str]]:
    """Collect what transformers would log of a load, instead of showing it."""
    reports: list[str] = []
    logger = logging.getLogger(PreTrainedModel.__module__)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: reports.append(record.getMessage())  # type: ignore[method-assign]
    kept = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING - 1)  # at WARNING, transformers checks its own plan and talks of it
    logger.propagate = False
    try:
        yield reports
    finally:
        logger.removeHandler(handler)
        logger.setLevel(kept[0])
        logger.propagate = kept[1]


def _require_shapes(spec: ModelSpec, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    wrong = [f"{name} is {list(got)}, not {list(want)}" for name, got, want in sorted(mismatched)]
    if wrong:
        raise SourceError(
            f"the checkpoint of {spec.name} disagrees with config.json: {_some(wrong, '; ')}; "
            "use the config.json that belongs to these weights"
        )


def _require_all(spec: ModelSpec, missing: Iterable[str]) -> None:
    names = sorted(missing, key=natural_key)
    if names:
        raise SourceError(
            f"the checkpoint of {spec.name} lacks {_count(names)}: {_some(names)}; "
            "download it again, or correct config.json"
        )


def _refuse_extra(spec: ModelSpec, unexpected: Iterable[str]) -> None:
    names = sorted(unexpected, key=natural_key)
    if names:
        pronoun = "it" if len(names) == 1 else "them"
        raise SourceError(
            f"the checkpoint of {spec.name} holds {_count(names)} that {spec.model_class.__name__} does not "
            f"use: {_some(names)}; remove {pronoun}, or correct architectures in config.json"
        )


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _some(texts: list[str], separator: str = ", ") -> str:
    rest = len(texts) - SHOWN
    return separator.join(texts[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
