"""Weights that are read when an operator needs them, and dropped after it.

A ``StreamedTensor`` stands for a parameter. An operator that only moves elements (the choice of one expert,
a transpose, a slice) gives another one, and nothing is read; any other operator gets the numbers. So it does
not matter which module's code reads a parameter, under which of its names, or how often: the memory is that
of the largest tensor that one operator takes.

What was read last is kept as long as it takes no more than the largest parameter: a parameter that a loop
reads in every step, or that is common to all ranks, is read once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from shardconv_runtime.checkpoint.recorded import RecordedTensor, moved
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.parallel.build import owner_of
from shardconv_runtime.tensors.copying import read_tensor
from shardconv_runtime.tensors.lazy_tensor import ComputedLeaf, LazyTensor, cast, concatenate, from_leaf, take
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .simulated_weights import fill

aten = torch.ops.aten


class TooLargeToRead(ShardconvError):
    """An operator takes a tensor for which there is not enough memory."""


class RecentReads:
    """Reads lazy tensors, and keeps those that were read last.

    Args:
        kept_bytes: most bytes of all tensors that are kept.
        max_bytes: most bytes of one tensor that is read.
    """

    def __init__(self, kept_bytes: int, max_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._max_bytes = max_bytes
        self._kept: OrderedDict[LazyTensor, Tensor] = OrderedDict()

    def read(self, name: str, lazy: LazyTensor) -> Tensor:
        """The numbers of a tensor, in its shape and dtype; they must not be written to.

        Raises:
            TooLargeToRead: it has more than ``max_bytes``.
            ShardconvError: the numbers were written to since they were read.
            SourceError: a file cannot be read.
        """
        found = self._kept.pop(lazy, None)
        if found is None:
            self._make_room(name, lazy.num_bytes)
            with torch.inference_mode(False):  # torch counts how often such a tensor is written to
                found = read_tensor(lazy)
        elif found._version:
            raise _written(name)
        self._kept[lazy] = found
        return found

    def _make_room(self, name: str, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise TooLargeToRead(
                f"an operator takes {num_bytes:,} bytes of {name} at once, and {self._max_bytes:,} may be "
                "taken here"
            )
        held = sum(tensor.nbytes for tensor in self._kept.values())
        while self._kept and held + num_bytes > self._kept_bytes:
            held -= self._kept.popitem(last=False)[1].nbytes


class StreamedTensor(Tensor):
    """A parameter on the CPU whose numbers are read when an operator needs them."""

    fqn: str
    lazy: LazyTensor
    reads: RecentReads

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as for any wrapper

    @staticmethod
    def __new__(cls, fqn: str, lazy: LazyTensor, reads: RecentReads) -> StreamedTensor:
        """A tensor of the shape and dtype of ``lazy``, for the parameter ``fqn``."""
        with torch.inference_mode(False):  # views of it that are made in inference mode count their versions
            made: StreamedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, lazy.shape, dtype=getattr(torch, lazy.dtype), device=torch.device("cpu")
            )
        made.fqn, made.lazy, made.reads = fqn, lazy, reads
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Without contents."""
        return f"StreamedTensor({self.fqn}, {self.lazy.dtype}, {list(self.lazy.shape)})"

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Itself; nothing has a gradient here."""
        return self

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """The numbers as an array."""
        return self.numbers().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """The numbers in lists."""
        return self.numbers().tolist()

    def numbers(self) -> Tensor:
        """A real tensor."""
        return self.reads.read(self.fqn, self.lazy)

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
        for given in _written_arguments(func, args, kwargs):
            if isinstance(given, StreamedTensor):
                raise _written(given.fqn)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        streamed = [tensor for tensor in tensors if isinstance(tensor, StreamedTensor)]
        if len(streamed) == len(tensors):
            found = _unread(func, args, kwargs, streamed[0])
            if found is not None:
                return found
        return func(*_numbers(args), **_numbers(kwargs))


def fill_streamed(
    model: nn.Module, tensors: Mapping[str, LazyTensor], dtype: torch.dtype, reads: RecentReads
) -> nn.Module:
    """Let the parameters of a model be read when they are needed, and read its buffers; return ``model``.

    Args:
        model: on meta; a parameter that is tied gets its numbers under each name.
        tensors: its parameters and persistent buffers, in its shapes.
        dtype: to compute in.
        reads: reads the parameters.
    """
    found: dict[str, Tensor] = {}
    for name, lazy in tensors.items():
        owner, attribute = owner_of(model, name)
        wanted = computing(name, lazy, dtype)
        is_parameter = attribute in owner._parameters
        found[name] = StreamedTensor(name, wanted, reads) if is_parameter else read_tensor(wanted)
    return fill(model, found)


def computing(name: str, tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """A tensor in the dtype to compute in, if it has numbers with a point; elements are cast when read."""
    if not getattr(torch, tensor.dtype).is_floating_point:
        return tensor
    wanted = str(dtype).removeprefix("torch.")
    found = cast(tensor, wanted)
    if found is None:  # its elements are cast already

        def read(span: tuple[int, int]) -> Tensor:
            return read_tensor(take(tensor, 0, (span,)) if tensor.shape else tensor)

        found = cast(computed_rows(name, tensor.dtype, tensor.shape, read), wanted)
    assert found is not None
    return found


def computed_rows(
    name: str, dtype: str, shape: Sequence[int], compute: Callable[[tuple[int, int]], Tensor]
) -> LazyTensor:
    """A tensor that is computed when it is read, a stack of matrices matrix by matrix.

    Args:
        name: for messages.
        dtype: of the tensor.
        shape: of the tensor.
        compute: returns a span of the first dim; all of a tensor without dims.
    """
    if len(shape) <= 2:
        return _computed(name, dtype, shape, partial(compute, (0, shape[0] if shape else 1)))
    rows = [_computed(name, dtype, (1, *shape[1:]), partial(compute, (i, i + 1))) for i in range(shape[0])]
    return concatenate(rows, 0)


def largest_read(tensor: LazyTensor, dtype: torch.dtype) -> int:
    """Bytes of a tensor in ``dtype`` that some operator takes at once: of a stack, one matrix at least."""
    numel = math.prod(tensor.shape)
    return (numel // max(tensor.shape[0], 1) if len(tensor.shape) > 2 else numel) * dtype.itemsize


def _computed(name: str, dtype: str, shape: Sequence[int], compute: Callable[[], Tensor]) -> LazyTensor:
    return from_leaf(ComputedLeaf(name, compute, dtype, math.prod(shape)), shape)


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operator writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[index] if index < len(args) else kwargs.get(argument.name)


def _unread(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: StreamedTensor) -> Any:
    """The results of an operator that moves elements of parameters, unread; None for any other operator."""
    if func.overloadpacket in _SAME:
        return StreamedTensor(like.fqn, like.lazy, like.reads)
    found = moved(
        func, *(tree_map_only(StreamedTensor, lambda t: RecordedTensor(t.lazy), a) for a in (args, kwargs))
    )
    return tree_map_only(RecordedTensor, lambda t: StreamedTensor(like.fqn, t.lazy, like.reads), found)


def _numbers(value: Any) -> Any:
    return tree_map_only(StreamedTensor, lambda tensor: tensor.numbers(), value)


def _written(name: str) -> ShardconvError:
    return ShardconvError(
        f"the forward pass writes to the parameter {name}, whose numbers are read from files each time that "
        "they are needed; leave out --numerics"
    )


_SAME = (aten.detach, aten.alias)
"""Operators that return their argument."""
