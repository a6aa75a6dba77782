"""Weights that are read when an operator needs them, and dropped after it.

A ``StreamedTensor`` is a proxy for a parameter. An operator that returns a view of it (one expert of a stack,
a transpose, a slice) returns another proxy, and nothing is read. Any other operator gets the numbers. It does
not matter which module's code reads a parameter, under which of its names, or how often: peak memory is the
size of the largest tensor that one operator reads. An operator that writes to a parameter runs again each
time that the parameter is read.

Recently read tensors are kept up to a fixed number of bytes, and the last one at any size. A parameter that a
loop reads in every step, or that all ranks share, is thus read once.
"""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from shardconv_runtime.checkpoint.copying import read_into, read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import (
    ComputedLeaf,
    LazyTensor,
    cast,
    concatenate,
    from_leaf,
    take,
)
from shardconv_runtime.checkpoint.recording_tensors import RecordedTensor
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.format.header import dtype_name
from shardconv_runtime.parallel.build import owner_of
from shardconv_runtime.parallel.fused_products import fused_products
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..tracing.identities import mutated_arguments
from .random_weights import fill

aten = torch.ops.aten

MAPPED_BYTES = 1 << 20
"""Tensors of at least this many bytes get an anonymous memory map."""


class TooLargeToRead(ShardconvError):
    """An operator reads a tensor for which there is not enough memory."""


class RecentReads:
    """Read lazy tensors, and keep the recently read ones."""

    def __init__(self, kept_bytes: int, max_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._max_bytes = max_bytes
        self._kept: OrderedDict[LazyTensor, Tensor] = OrderedDict()

    def read(self, name: str, lazy: LazyTensor) -> Tensor:
        """Return the numbers of a tensor, in its shape and dtype. They must not be written to."""
        read = self._kept.pop(lazy, None)
        if read is None:
            if lazy.num_bytes > self._max_bytes:
                raise TooLargeToRead(
                    f"an operator takes {lazy.num_bytes:,} bytes of {name} at once, and {self._max_bytes:,} "
                    "may be taken here"
                )
            num_bytes = sum(tensor.nbytes for tensor in self._kept.values())
            while self._kept and num_bytes + lazy.num_bytes > self._kept_bytes:
                num_bytes -= self._kept.popitem(last=False)[1].nbytes
            # The allocator would keep memory for each thread that has run, more than all memory in use. A
            # mapping goes back to the system when the tensor is dropped.
            dtype = getattr(torch, lazy.dtype)
            if lazy.num_bytes < MAPPED_BYTES:
                read = torch.empty(lazy.shape, dtype=dtype)
            else:
                memory = mmap.mmap(-1, lazy.num_bytes)
                with suppress(AttributeError, OSError):  # a hint that not every system knows
                    memory.madvise(mmap.MADV_HUGEPAGE)
                read = torch.frombuffer(memory, dtype=dtype).view(lazy.shape)
            read_into([lazy], [read])
        self._kept[lazy] = read
        return read


@dataclass(eq=False, slots=True)
class _Parameter:
    """The contents of a parameter, shared by its aliases."""

    fqn: str
    lazy: LazyTensor
    reads: RecentReads
    num_writes: int = 0


class StreamedTensor(Tensor):
    """A parameter on the CPU, or a view of one, whose numbers are read when an operator needs them."""

    _parameter: _Parameter
    _view: LazyTensor | None
    """Lazy elements of a view of the parameter; None for an alias of the full parameter."""
    _num_writes: int
    """Number of writes to the parameter before the view was taken."""

    __torch_function__ = nn.Parameter.__torch_function__  # none, as for any wrapper

    @staticmethod
    def __new__(cls, parameter: _Parameter, view: LazyTensor | None = None) -> StreamedTensor:
        """Make a tensor with the shape and dtype of the view, or of the parameter."""
        lazy = parameter.lazy if view is None else view
        with torch.inference_mode(False):  # inference tensors have no version counters
            made: StreamedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, lazy.shape, dtype=getattr(torch, lazy.dtype), device=torch.device("cpu")
            )
        made._parameter, made._view, made._num_writes = parameter, view, parameter.num_writes
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Name the parameter without its contents."""
        return f"StreamedTensor({self._parameter.fqn}, {self.dtype}, {list(self.shape)})"

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Return itself, since streamed tensors have no gradients."""
        return self

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Return the numbers as an array."""
        return self.numbers().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """Return the numbers in lists."""
        return self.numbers().tolist()

    def numbers(self) -> Tensor:
        """Return a real tensor, which must not be written to."""
        return self._parameter.reads.read(self._parameter.fqn, self.lazy)

    @property
    def lazy(self) -> LazyTensor:
        """Return the elements as a lazy tensor."""
        if self._view is None:
            return self._parameter.lazy
        if self._num_writes != self._parameter.num_writes:
            raise _written(self._parameter.fqn)
        return self._view

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if any(isinstance(tensor, StreamedTensor) for tensor in mutated_arguments(func, args, kwargs)):
            return _write(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        streamed = [tensor for tensor in tensors if isinstance(tensor, StreamedTensor)]
        if len(streamed) == len(tensors):
            parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            if all(result.alias_info is not None for result in func._schema.returns):
                return _view(func, args, kwargs, streamed[0])
        return func(*_numbers(args), **_numbers(kwargs))


def fill_streamed(
    model: nn.Module, tensors: Mapping[str, LazyTensor], dtype: torch.dtype, reads: RecentReads
) -> nn.Module:
    """Replace the parameters of a model by streamed tensors, read its buffers, and return ``model``."""
    filled: dict[str, Tensor] = {}
    for name, lazy in tensors.items():
        owner, attribute = owner_of(model, name)
        value = computing(name, lazy, dtype)
        is_parameter = attribute in owner._parameters
        parameter = _Parameter(name, value, reads)
        filled[name] = StreamedTensor(parameter) if is_parameter else read_tensor(value)
    fill(model, filled)
    for product in fused_products(model):
        weights, biases = ([m._parameters[name] for m in product.members] for name in ("weight", "bias"))
        product.span(_spanning(weights), _spanning(biases), has_bias=biases[0] is not None)
    return model


class FileWeights:
    """Weights in files, which are read when an operator needs them."""

    own_copies = False

    def __init__(
        self,
        unsharded: Mapping[str, LazyTensor],
        ranks: Sequence[Mapping[str, LazyTensor]],
        reads: RecentReads,
        advance: Callable[[int], object],
    ) -> None:
        self._unsharded = unsharded
        self._ranks = ranks
        self._reads = reads
        self._advance = advance

    def put_into(
        self, model: nn.Module, rank: int | None, dtype: torch.dtype, *, gradients: bool = False
    ) -> nn.Module:
        """See ``SimulatedWeights``; streamed weights have no gradients."""
        fill_streamed(model, self._unsharded if rank is None else self._ranks[rank], dtype, self._reads)
        for fqn, module in model.named_modules() if rank is None else ():
            prefix = f"{fqn}." if fqn else ""
            names = [prefix + name for name in (*module._parameters, *module._buffers)]
            if num_bytes := sum(self._unsharded[n].num_bytes for n in names if n in self._unsharded):
                once = iter([num_bytes])
                module.register_forward_pre_hook(lambda *_, once=once: self._advance(next(once, 0)) and None)
        return model

    def were_written_to(self) -> bool:
        """Return False: writes are repeated when a parameter is read."""
        return False


def _spanning(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of several streamed tensors into one; None if a part is missing."""
    if any(not isinstance(part, StreamedTensor) for part in parts):
        return None
    owned = parts[0]._parameter
    name = f"{owned.fqn} and those fused with it"
    return StreamedTensor(_Parameter(name, concatenate([part.lazy for part in parts], 0), owned.reads))


def computing(name: str, tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Cast a floating point tensor to the dtype to compute in. Elements are cast when they are read."""
    if not getattr(torch, tensor.dtype).is_floating_point:
        return tensor
    name_of_dtype = dtype_name(dtype)
    value = cast(tensor, name_of_dtype)
    if value is None:  # its elements are cast already

        def read(span: tuple[int, int]) -> Tensor:
            return read_tensor(take(tensor, 0, (span,)) if tensor.shape else tensor)

        value = cast(computed_rows(name, tensor.dtype, tensor.shape, read), name_of_dtype)
    assert value is not None
    return value


def computed_rows(
    name: str, dtype: str, shape: Sequence[int], compute: Callable[[tuple[int, int]], Tensor]
) -> LazyTensor:
    """Make a tensor that is computed when it is read. Stacks are computed matrix by matrix."""
    if len(shape) <= 2:
        return computed(name, dtype, shape, partial(compute, (0, shape[0] if shape else 1)))
    rows = [computed(name, dtype, (1, *shape[1:]), partial(compute, (i, i + 1))) for i in range(shape[0])]
    return concatenate(rows, 0)


def largest_read(tensor: LazyTensor, dtype: torch.dtype) -> int:
    """Return the most bytes in ``dtype`` that an operator reads at once. For stacks, this is one matrix."""
    numel = math.prod(tensor.shape)
    return (numel // max(tensor.shape[0], 1) if len(tensor.shape) > 2 else numel) * dtype.itemsize


def computed(name: str, dtype: str, shape: Sequence[int], compute: Callable[[], Tensor]) -> LazyTensor:
    """Make a tensor that is computed when it is read; the name is for messages."""
    return from_leaf(ComputedLeaf(name, compute, dtype, math.prod(shape)), shape)


def _write(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StreamedTensor:
    """Repeat an operator that writes to a parameter whenever the parameter is read from now on."""
    target, *rest = args
    parameters = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StreamedTensor)]
    if not isinstance(target, StreamedTensor) or target._view is not None or len(parameters) > 1:
        raise _written(parameters[0]._parameter.fqn)
    parameter, before = target._parameter, target._parameter.lazy

    def written() -> Tensor:
        numbers = read_tensor(before)
        func(numbers, *rest, **kwargs)
        return numbers

    parameter.lazy = computed(parameter.fqn, before.dtype, before.shape, written)
    parameter.num_writes += 1
    return target


def _view(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], source: StreamedTensor) -> Any:
    """Return the results of an operator that returns views of a parameter."""
    if func.overloadpacket in _SAME:
        return StreamedTensor(source._parameter, source._view)
    args, kwargs = tree_map_only(StreamedTensor, lambda t: RecordedTensor(t.lazy), (args, dict(kwargs)))
    view = func(*args, **kwargs)
    return tree_map_only(RecordedTensor, lambda t: StreamedTensor(source._parameter, t.lazy), view)


def _numbers(value: Any) -> Any:
    return tree_map_only(StreamedTensor, lambda tensor: tensor.numbers(), value)


def _written(name: str) -> ShardconvError:
    return ShardconvError(
        f"the forward pass writes to a part or a copy of the parameter {name}, whose numbers are read from "
        "files each time that they are needed; leave out --numerics"
    )


_SAME = (aten.detach, aten.alias)
"""Operators that return an alias of their argument."""
