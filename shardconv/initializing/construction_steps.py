"""The steps of a construction: operators that wrote to memory, and which memory they read and wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NewType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

BLANK = {
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
"""Make memory without values."""

SHAPED = {
    *BLANK,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.rand_like,
    aten.randn_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
}
"""Read no more than the shape of their first argument."""

OVERWRITES = {
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.normal_,
    aten.uniform_,
    aten.log_normal_,
    aten.exponential_,
    aten.cauchy_,
    aten.bernoulli_,
    aten.random_,
}
"""Write to every element of their first argument without reading it."""

FILLS = frozenset({nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_})
"""Functions that ``LazyInit`` records as one step, as they were when torch was imported."""

TRUNCATED = nn.init._no_grad_trunc_normal_
"""Private: all references to ``trunc_normal_``, wherever they were imported to, come here. On a meta tensor
torch does nothing; done step by step, it would draw until no element lies outside."""

ELEMENTWISE = {nn.init.uniform_, nn.init.normal_, TRUNCATED, aten.normal_.default, aten.uniform_.default}
"""Draw each element on its own from one distribution: part of a tensor may be drawn alone."""


MemoryKey = NewType("MemoryKey", int)
"""Stands for the memory under tensors, as long as one of them or a window is there."""


def memory_key(tensor: Tensor) -> MemoryKey:
    """The key of the memory under a tensor."""
    return MemoryKey(int(tensor.untyped_storage()._cdata))


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The geometry of a meta tensor when it was seen; some operators change a tensor's shape in place."""

    memory: torch.UntypedStorage
    """It is kept, so that its identity stays its own."""
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Window:
        """The window of a tensor."""
        offset = int(tensor.storage_offset())
        flags = tensor.is_conj(), tensor.is_neg()
        return cls(tensor.untyped_storage(), tensor.dtype, offset, tensor.shape, tensor.stride(), *flags)

    @property
    def key(self) -> MemoryKey:
        """The key of the memory."""
        return MemoryKey(int(self.memory._cdata))

    @property
    def spans(self) -> bool:
        """Whether it is all of its memory, each element once."""
        expected = 1
        for size, stride in sorted(zip(self.shape, self.stride, strict=True), key=lambda dim: dim[1]):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return self.shape.numel() * self.dtype.itemsize == self.memory.nbytes()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operator that wrote to some memory, with windows instead of tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    default_dtype: torch.dtype
    reads: frozenset[MemoryKey]
    """Storages whose values it reads."""
    writes: frozenset[MemoryKey]
    covers: frozenset[MemoryKey]
    """Storages of which nothing older is left; those that it made are among them."""

    @property
    def is_random(self) -> bool:
        """Whether it draws numbers."""
        return _is_random(self.func)

    @property
    def is_blank(self) -> bool:
        """Whether it makes memory without values."""
        return packet_of(self.func) in BLANK


@dataclass(frozen=True, slots=True)
class Chain:
    """The steps that a tensor's value depends on."""

    indices: tuple[int, ...]
    """Ascending."""
    blank: bool
    """Some of them may leave elements without a value."""
    is_written: bool
    """Whether any step gives the tensor itself values."""


def draw(step: Step, tensor: Tensor, seed: int) -> None:
    """Do an elementwise step on another tensor, in place; threads may do so at the same time."""
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = tree_map_only(Window, lambda _: tensor, (step.args, step.kwargs))
    with torch.no_grad():
        step.func(*args, **{**kwargs, "generator": generator})


def changed_windows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Window]:
    """The tensors that an operator writes to."""
    if func in FILLS or func is TRUNCATED:
        return windows_in((args, kwargs))
    given = [value for value, written in zip(args, _written(func)[0], strict=False) if written]
    return windows_in(given + [value for name, value in kwargs.items() if name in _written(func)[1]])


def windows_in(values: Any) -> list[Window]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Window)]


@cache
def _written(func: Any) -> tuple[tuple[bool, ...], frozenset[str]]:
    """Which arguments an operator writes to, by position and by name."""
    arguments = func._schema.arguments
    flags = tuple(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    return flags, frozenset(a.name for a, flag in zip(arguments, flags, strict=True) if flag)


@cache
def _is_random(func: Any) -> bool:
    return func in FILLS or func is TRUNCATED or torch.Tag.nondeterministic_seeded in func.tags


def packet_of(func: Any) -> Any:
    return getattr(func, "overloadpacket", func)
