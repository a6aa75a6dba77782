"""Tensors without bytes that record the operations on them as lazy tensors.

transformers converts a checkpoint on the way to the parameters of a model: it renames, stacks,
concatenates, splits, transposes and casts. Its own code runs on these tensors; the results are lazy tensors
over the checkpoint's bytes. An operation that only moves elements keeps the tensor lazy; any other is
recorded as a computation that runs on real tensors when its result is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # the documented way to see every operator
from torch.utils._pytree import tree_leaves, tree_map

from ..format.header import dtype_name
from .copying import read_tensor
from .lazy_tensor import (
    ComputedLeaf,
    LazyTensor,
    cast,
    concatenate,
    from_leaf,
    permute,
    reshape,
    squeeze,
    take,
    unsqueeze,
    zeros,
)

aten = torch.ops.aten

LARGE = 1 << 20
"""Tensors of at least this many elements that the checkpoint lacks are not allocated."""


class InPlaceError(NotImplementedError):
    """Code writes into a tensor of the checkpoint, which is recorded without bytes."""


class RecordedTensor(torch.Tensor):
    """A tensor without bytes that appears to be on the CPU."""

    lazy: LazyTensor
    absent: bool
    """It represents a large new parameter that the checkpoint lacks, and that is not allocated."""
    computed: bool
    """It is the result of a computation: writing to it changes no tensor of the checkpoint."""

    @staticmethod
    def __new__(cls, lazy: LazyTensor, absent: bool = False, computed: bool = False) -> RecordedTensor:
        """Make a tensor of the shape and dtype of ``lazy``."""
        made: RecordedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, lazy.shape, dtype=getattr(torch, lazy.dtype), device=torch.device("cpu")
        )
        made.lazy, made.absent, made.computed = lazy, absent, computed
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Return shape and dtype, without contents."""
        return f"RecordedTensor({self.lazy.dtype}, {list(self.lazy.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record one operator."""
        kwargs = kwargs or {}
        recorded = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RecordedTensor)]
        if func._schema.is_mutable:
            target = args[0] if "out" not in kwargs else None
            if isinstance(target, RecordedTensor):
                # A parametrized weight is a product of two: code that initializes it fills only that.
                target.absent |= target.computed and func.overloadpacket in _FILLS
                if target.absent:
                    return target
            raise InPlaceError(f"{func} changes a tensor of the checkpoint in place")
        if func.overloadpacket in _NEW:
            return _new(func, args, kwargs)
        if func.overloadpacket is aten.equal:
            return _equal(*args)
        if any(tensor.absent for tensor in recorded):
            return on_meta(func, args, kwargs, _absent)
        if func.overloadpacket in _COPIES:
            return RecordedTensor(args[0].lazy)
        results = on_meta(func, args, kwargs, lambda result: result)  # raises torch's own errors
        move = _MOVES.get(func.overloadpacket)
        moved = move(*args, **kwargs) if move is not None else None
        if moved is None:
            return _computed(func, args, kwargs, results)
        assert _kinds(moved) == _kinds(results), f"{func} was recorded as {_kinds(moved)}"
        return moved


class LeavingOutAbsent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which large new parameters are not allocated."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Intercept ``torch.empty_like`` of a large meta tensor on another device."""
        kwargs = kwargs or {}
        if func is aten.empty_like.default and args[0].is_meta and args[0].numel() >= LARGE:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type != "meta":
                return _absent(args[0])
        return func(*args, **kwargs)


@contextmanager
def recording(tensors: Mapping[str, LazyTensor | torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Record the operations on a checkpoint's tensors in this context.

    Args:
        tensors: global, by name; real tensors stay as they are.

    Yields:
        Tensors of the same names, shapes and dtypes, which appear to be on the CPU.
    """
    with LeavingOutAbsent():  # type: ignore[no-untyped-call]
        yield {
            name: RecordedTensor(tensor) if isinstance(tensor, LazyTensor) else tensor
            for name, tensor in tensors.items()
        }


def lazy_of(tensor: torch.Tensor) -> LazyTensor | None:
    """Return the lazy tensor of a result; None if it is absent from the checkpoint.

    A real tensor, which code computed from constants only, is kept in memory.

    Args:
        tensor: global, recorded or real, of any shape and dtype.
    """
    if isinstance(tensor, RecordedTensor):
        return None if tensor.absent else tensor.lazy
    detached = tensor.detach()
    dtype = dtype_name(detached.dtype)
    leaf = ComputedLeaf("a constant of the model", Constant(detached), dtype, detached.numel())
    return from_leaf(leaf, detached.shape)


def small_ones_read(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor | torch.Tensor]:
    """Return the tensors of a checkpoint with the small ones read into memory, so that code may write into
    them.

    Args:
        tensors: global, by name.

    Returns:
        Tensors by name, with the same shapes and dtypes; the ones with fewer than ``LARGE`` elements are on
        the CPU.
    """
    return {
        name: read_tensor(lazy) if math.prod(lazy.shape) < LARGE else lazy for name, lazy in tensors.items()
    }


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements; recorded ones are read in bands."""
    if x.shape != y.shape or x.dtype != y.dtype or any(getattr(t, "absent", False) for t in (x, y)):
        return False
    if isinstance(x, RecordedTensor) and isinstance(y, RecordedTensor) and x.lazy == y.lazy:
        return True
    if x.numel() == 0 or x.dim() == 0:
        return torch.equal(*(_band(t, None) for t in (x, y)))
    rows = max(1, LARGE * x.shape[0] // x.numel())
    bands = ((start, min(start + rows, x.shape[0])) for start in range(0, x.shape[0], rows))
    return all(torch.equal(_band(x, band), _band(y, band)) for band in bands)


def _band(x: torch.Tensor, rows: tuple[int, int] | None) -> torch.Tensor:
    """Return some rows of a tensor, or all of it, read."""
    if not isinstance(x, RecordedTensor):
        return x if rows is None else x[rows[0] : rows[1]]
    return read_tensor(x.lazy if rows is None else take(x.lazy, 0, [rows]))


def _new(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Return a new tensor of the shape of a recorded one: real, or absent if it is large."""
    (meta,) = tree_leaves(on_meta(func, args, kwargs, lambda result: result))
    if meta.numel() >= LARGE:
        return _absent(meta)
    like, *rest = args
    made: torch.Tensor = func(torch.empty(like.shape, dtype=like.dtype), *rest, **kwargs)
    return made


def _absent(meta: torch.Tensor) -> RecordedTensor:
    return RecordedTensor(zeros(dtype_name(meta.dtype), meta.shape), absent=True)


def on_meta(func: Any, args: Any, kwargs: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """Run an operator on meta tensors."""

    def to_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    results = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
    return tree_map(lambda value: make(value) if isinstance(value, torch.Tensor) else value, results)


def _kinds(results: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tree_leaves(results)]


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor in memory as the computation of a lazy leaf; another process may be given it."""

    tensor: torch.Tensor

    def __call__(self) -> torch.Tensor:
        """Return the tensor."""
        return self.tensor


@dataclass(frozen=True, slots=True)
class RecordedOperator:
    """An operator that runs when its result is needed, as a value that another process may be given."""

    namespace: str
    name: str
    overload: str
    args: tuple[Any, ...]
    """Lazy tensors in place of recorded ones."""
    kwargs: Mapping[str, Any]
    index: int
    """The index of the result among the operator's results."""

    def __call__(self) -> torch.Tensor:
        """Read the tensors and run it."""
        func = getattr(getattr(getattr(torch.ops, self.namespace), self.name), self.overload)
        results = tree_leaves(func(*tree_map(_read, self.args), **tree_map(_read, dict(self.kwargs))))
        tensor: torch.Tensor = [value for value in results if isinstance(value, torch.Tensor)][self.index]
        return tensor


def _read(value: Any) -> Any:
    return read_tensor(value) if isinstance(value, LazyTensor) else value


def _unread(value: Any) -> Any:
    return value.lazy if isinstance(value, RecordedTensor) else value


def _computed(func: Any, args: Any, kwargs: Any, results: Any) -> Any:
    """Record an operator as a computation; each of several results is computed separately."""
    namespace, _, name = func._schema.name.partition("::")
    arguments = tree_map(_unread, args), tree_map(_unread, kwargs)
    count = 0

    def record(meta: torch.Tensor) -> RecordedTensor:
        nonlocal count
        dtype = dtype_name(meta.dtype)
        compute = RecordedOperator(namespace, name, str(func).rpartition(".")[2], *arguments, count)
        leaf = ComputedLeaf(str(func), compute, dtype, meta.numel())
        count += 1
        return RecordedTensor(from_leaf(leaf, meta.shape), computed=True)

    return tree_map(lambda value: record(value) if isinstance(value, torch.Tensor) else value, results)


def _to_copy(tensor: RecordedTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    lazy = tensor.lazy if dtype is None else cast(tensor.lazy, dtype_name(dtype))
    return None if lazy is None else RecordedTensor(lazy)


def _view(tensor: RecordedTensor, shape: Sequence[int], *args: Any) -> Any:
    if isinstance(shape, torch.dtype):
        return None
    sizes = list(shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = tensor.numel() // -math.prod(sizes)
    lazy = reshape(tensor.lazy, sizes)
    return None if lazy is None else RecordedTensor(lazy)


def _transpose(tensor: RecordedTensor, dim0: int, dim1: int) -> RecordedTensor:
    order = list(range(tensor.dim())) or [0]  # torch accepts dim 0 of a scalar
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return RecordedTensor(permute(tensor.lazy, order[: tensor.dim()]))


def _t(tensor: RecordedTensor) -> RecordedTensor:
    return _transpose(tensor, 0, 1) if tensor.dim() == 2 else RecordedTensor(tensor.lazy)


def _permute(tensor: RecordedTensor, order: Sequence[int]) -> RecordedTensor:
    return RecordedTensor(permute(tensor.lazy, [dim % tensor.dim() for dim in order]))


def _slice(
    tensor: RecordedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if step != 1:
        return None
    begin, stop, _ = slice(start, end).indices(tensor.shape[dim])
    return RecordedTensor(take(tensor.lazy, dim % tensor.dim(), ((begin, max(begin, stop)),)))


def _select(tensor: RecordedTensor, dim: int, index: int) -> RecordedTensor:
    dim, index = dim % tensor.dim(), index % tensor.shape[dim]
    return RecordedTensor(squeeze(take(tensor.lazy, dim, ((index, index + 1),)), dim))


def _split_with_sizes(tensor: RecordedTensor, sizes: Sequence[int], dim: int = 0) -> list[RecordedTensor]:
    dim, start = dim % tensor.dim(), 0
    parts = []
    for size in sizes:
        parts.append(RecordedTensor(take(tensor.lazy, dim, ((start, start + size),))))
        start += size
    return parts


def _split(tensor: RecordedTensor, size: int | Sequence[int], dim: int = 0) -> list[RecordedTensor]:
    if not isinstance(size, int):
        return _split_with_sizes(tensor, size, dim)
    extent = tensor.shape[dim]
    return _split_with_sizes(tensor, [min(size, extent - at) for at in range(0, extent, size)] or [0], dim)


def _unbind(tensor: RecordedTensor, dim: int = 0) -> list[RecordedTensor]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _squeeze(tensor: RecordedTensor, dims: int | Sequence[int] | None = None) -> RecordedTensor:
    chosen = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    lazy = tensor.lazy
    for dim in sorted({dim % max(tensor.dim(), 1) for dim in chosen}, reverse=True):
        if lazy.shape and lazy.shape[dim] == 1:
            lazy = squeeze(lazy, dim)
    return RecordedTensor(lazy)


def _unsqueeze(tensor: RecordedTensor, dim: int) -> RecordedTensor:
    return RecordedTensor(unsqueeze(tensor.lazy, dim % (tensor.dim() + 1)))


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    parts = [lazy_of(tensor) for tensor in tensors if tuple(tensor.shape) != (0,)]
    present = [part for part in parts if part is not None]
    if not present or len({part.dtype for part in present}) > 1:
        return None
    return RecordedTensor(concatenate(present, dim % len(present[0].shape)))


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    dim %= tensors[0].dim() + 1
    parts = [lazy_of(tensor) for tensor in tensors]
    present = [unsqueeze(part, dim) for part in parts if part is not None]
    return RecordedTensor(concatenate(present, dim)) if len({part.dtype for part in present}) == 1 else None


_FILLS = {aten.normal_, aten.uniform_, aten.fill_, aten.zero_}
"""Operators after which nothing is left of the old values of a tensor."""
_COPIES = {aten.alias, aten.detach, aten.clone, aten.lift_fresh, aten.contiguous}
"""Operators whose result equals their argument."""

_MOVES: dict[Any, Callable[..., Any]] = {
    aten._to_copy: _to_copy,
    aten.view: _view,
    aten.reshape: _view,
    aten.transpose: _transpose,
    aten.t: _t,
    aten.permute: _permute,
    aten.slice: _slice,
    aten.select: _select,
    aten.split: _split,
    aten.split_with_sizes: _split_with_sizes,
    aten.unbind: _unbind,
    aten.squeeze: _squeeze,
    aten.unsqueeze: _unsqueeze,
    aten.cat: _cat,
    aten.stack: _stack,
}
"""Operators that only move elements."""

_NEW = (
    aten.empty_like,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.rand_like,
    aten.randn_like,
    aten.new_empty,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
)
"""Operators that only read the shape of their first argument."""
