"""A model that sees smaller images or sounds, and whose code does what that of another one does.

Widths shrink in the traced model itself. How many patches an image has is said in many places, tables of
positions among them, so that the model is built again from a config with smaller sizes. It is taken if its
trace is that of the full model, operator by operator, but for numbers and sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardconv_runtime.parallel.build import stored_tensors
from torch import nn

from ...tracing.ints import TracedInt
from ...tracing.tape import Mark, Ref, Tape
from .small_model import Resized


def resized_tensors(full: nn.Module, fewer: nn.Module) -> Mapping[str, Resized] | None:
    """The stored tensors of which two models have other shapes; None if they do not have the same tensors.

    Args:
        full: on meta.
        fewer: the same built from another config.
    """
    before, after = (dict(stored_tensors(model)) for model in (full, fewer))
    if list(before) != list(after) or any(t.dim() != after[n].dim() for n, t in before.items()):
        return None
    return {
        name: Resized(tuple(tensor.shape), tuple(after[name].shape))
        for name, tensor in before.items()
        if tensor.shape != after[name].shape
    }


def is_same_code(full: Tape, fewer: Tape) -> bool:
    """Whether two tapes have the same operators on the same tensors, but for numbers and sizes."""
    if len(full.events) != len(fewer.events) or len(full.tensors) != len(fewer.tensors):
        return False
    if full.opaque.keys() != fewer.opaque.keys() or full.outputs != fewer.outputs:
        return False
    infos = zip(full.tensors, fewer.tensors, strict=True)
    if any(
        (a.kind, a.name, a.dtype, len(a.shape)) != (b.kind, b.name, b.dtype, len(b.shape)) for a, b in infos
    ):
        return False
    return all(_form(full, a) == _form(fewer, b) for a, b in zip(full.events, fewer.events, strict=True))


def _form(tape: Tape, event: Any) -> tuple[Any, ...]:
    """What an event does, but for numbers."""
    fqn = tape.calls[event.call].fqn
    if isinstance(event, Mark):
        return fqn, event.slots, event.source, event.target
    return fqn, event.name, event.inputs, event.outputs, _without_numbers((event.args, event.kwargs))


def _without_numbers(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_without_numbers, value))
    if isinstance(value, dict):
        return tuple((key, _without_numbers(item)) for key, item in value.items())
    if isinstance(value, (int, float, TracedInt)) and not isinstance(value, bool):
        return "number"
    return value.tid if isinstance(value, Ref) else str(value)
