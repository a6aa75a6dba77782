"""Properties of ATen operators, and their results on meta tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .identities import META

FIRST_ASKED = {
    "aten.index.Tensor": 1,
    "aten.masked_select.default": 1,
    "aten.repeat_interleave.self_Tensor": 1,
}
"""Operators whose result shape depends on values -> the first input whose values are needed."""


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """Properties of an operator, which are looked up once."""

    name: str
    take_apart: bool
    """Whether it is composite, and recorded as its parts."""
    is_mutable: bool
    takes_device: bool
    makes_new: bool
    """Whether it returns one tensor that shares memory with no other."""

    @classmethod
    def of(cls, func: Any, keep: Collection[str]) -> OperatorFacts:
        """Return the facts of an ATen overload. Composite operators in ``keep`` are not decomposed."""
        name = str(func)
        kept = name.rsplit(".", 1)[0].rstrip("_") in keep
        return cls(
            name=name,
            take_apart=not kept and func._can_decompose(),
            is_mutable=func._schema.is_mutable,
            takes_device=any(a.name == "device" for a in func._schema.arguments),
            makes_new=not func._schema.is_mutable
            and len(func._schema.returns) == 1
            and func._schema.returns[0].alias_info is None,
        )


class MetaResults:
    """Cache the results of operators that make one new tensor, since layers repeat and meta functions are
    slow."""

    MOST = 50_000
    """Number of results at which the cache is cleared."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func``, whose tensor arguments are on the meta device."""
        key = (func, torch.get_default_dtype(), _geometry(args), _geometry(tuple(kwargs.items())))
        known = self._known.get(key)
        if known is not None:
            shape, stride, dtype = known
            return torch.empty_strided(shape, stride, dtype=dtype, device=META)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            if len(self._known) >= self.MOST:
                self._known.clear()
            self._known[key] = (result.shape, result.stride(), result.dtype)
        return result


META_RESULTS = MetaResults()
"""Shared by all traces, since a model is traced several times for a plan."""


def _geometry(value: Any) -> Any:
    """Return an operator's arguments as a hashable value, tensors by shape, strides and dtype."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_geometry(v) for v in value)
    return type(value), value


def result_on_meta(name: str, args: Any) -> Tensor | None:
    """Return the result of an operator whose meta function rejects some dtypes; None for other operators.

    ``_grouped_mm`` of x ``[S, I]`` and weight ``[E, I, O]`` returns ``[S, O]``.
    """
    if name == "aten._grouped_mm.default":
        x, weight = args[0], args[1]
        return torch.empty(*x.shape[:-1], weight.shape[-1], dtype=x.dtype, device=META)
    return None


def mutated_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to, in the order of its schema."""
    out = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                out.append(value)
    return out


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments and in lists of arguments."""
    out: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            out.append(value)
        elif isinstance(value, (tuple, list)):
            out += tensors_in(value)
    return out
