"""Read the parameters of a model from its checkpoint, as transformers itself would.

transformers renames, stacks, splits and transposes what a checkpoint holds on the way to a
parameter; its own ``from_pretrained`` does it here, on the CPU, so that all of it applies.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from shardconv_runtime.errors import SourceError
from shardconv_runtime.names import natural_key
from transformers import PreTrainedModel

from .locate import brief
from .spec import ModelSpec

SHOWN = 3
"""How many names an error lists."""

_UNCONVERTED = re.compile(r"^(\S+) +\| +(?:\x1b\[\d+m)?CONVERSION", re.MULTILINE)
"""A row of transformers' loading report."""


def read_weights(spec: ModelSpec, names: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors of the parameters and persistent buffers ``names``, global, on the CPU.

    Args:
        spec: a model with a directory.
        names: FQNs; those of tied parameters may be left out.

    Raises:
        SourceError: a tensor is missing from the checkpoint, not used by the model, or of another shape.
    """
    model, info = _load(spec)
    _require_shapes(spec, info["mismatched_keys"])
    _require_all(spec, info["missing_keys"])
    _refuse_extra(spec, info["unexpected_keys"])
    found: dict[str, torch.Tensor] = model.state_dict()
    absent = sorted(set(names) - found.keys())
    if absent:
        raise SourceError(
            f"the model of {spec.name} has no {_some(absent)}, which the plan names; plan it again"
        )
    return {name: found[name] for name in names}


def _load(spec: ModelSpec) -> tuple[Any, dict[str, Any]]:
    reports: list[str] = []
    try:
        with _loading_reports() as reports:
            loaded: tuple[Any, dict[str, Any]] = spec.model_class.from_pretrained(  # type: ignore[attr-defined]
                str(spec.directory),
                config=spec.config,
                dtype=getattr(torch, spec.dtype),
                local_files_only=True,
                trust_remote_code=spec.trust_remote_code,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
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
