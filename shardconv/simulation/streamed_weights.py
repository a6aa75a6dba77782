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
from dataclasses import dataclass, replace
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
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.parallel.build import owner_of
from shardconv_runtime.parallel.fused_products import fused_products
from shardconv_runtime.parallel.local_modules import local_tensor
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

# Weights for simulations: drawn, sliced, and put into models on meta.


@dataclass(frozen=True, slots=True)
class Draw:
    """A choice of random numbers to draw."""

    seed: int = 0
    scale: float = 1.0
    """Factor of matrices; with 1, activations keep their range."""
    vectors: float = 1.0
    """Approximate size of the values of 1-D parameters."""

    def __str__(self) -> str:
        matrices = f", matrices times {self.scale}" if self.scale != 1 else ""
        vectors = f", vectors times {self.vectors}" if self.vectors != 1 else ""
        return f"seed {self.seed}{matrices}{vectors}"


USUAL = Draw()


class RandomWeights:
    """The same random weights for the unsharded model and the ranks, drawn and sliced once for each dtype.

    Models share these weights, unless ``own_copies`` is set. Then each model gets a copy.
    """

    def __init__(self, plan: Plan, draw: Draw = USUAL) -> None:
        self.own_copies = False
        self._plan = plan
        self._draw = draw
        self._made: dict[torch.dtype, Mapping[str, Tensor]] = {}
        self._local: dict[tuple[torch.dtype, int], Mapping[str, Tensor]] = {}
        self._versions: dict[torch.dtype, list[int]] = {}

    def were_written_to(self) -> bool:
        """Return whether a model's code changed its weights. If it did, they are drawn again, and models get
        copies."""
        if self.own_copies or all(_versions(made) == self._versions[d] for d, made in self._made.items()):
            return False
        self.own_copies = True
        self._made.clear()
        self._local.clear()
        return True

    def unsharded(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return the weights of the unsharded model, in the shapes and dtypes of ``tensors`` (on meta).

        Args:
            tensors: tensors by name, the same in each call.
            dtype: the dtype of floating point tensors.
        """
        if dtype not in self._made:
            self._made[dtype] = {name: _random(name, tensor, self._draw) for name, tensor in tensors.items()}
            self._versions[dtype] = _versions(self._made[dtype])
        return self._given(self._made[dtype])

    def local(self, rank: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return the local weights of one rank, with the same names and dtypes."""
        if (dtype, rank) not in self._local:
            self._local[dtype, rank] = local_weights(self._made[dtype], self._plan, rank)
        return self._given(self._local[dtype, rank])

    def _given(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {n: w.clone() for n, w in weights.items()} if self.own_copies else weights


def _versions(weights: Mapping[str, Tensor]) -> list[int]:
    return [weight._version for weight in weights.values()]


def _random(name: str, tensor: Tensor, draw: Draw) -> Tensor:
    """Draw weights in a range that keeps activations in range; norms and biases are random as well."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 31 + len(name) + draw.seed * 1_000_003)
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dim() < 2:
        return (torch.rand(tensor.shape, generator=generator).to(tensor.dtype) + 0.5) * draw.vectors
    inputs = tensor.shape[1:] if tensor.dim() > 3 else tensor.shape[-1:]  # convolutions; products
    size = math.sqrt(math.prod(inputs)) / draw.scale
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype).div_(size)


def local_weights(weights: Mapping[str, Tensor], plan: Plan, rank: int) -> dict[str, Tensor]:
    """Return a rank's shard of every weight (global shapes to local ones), without casting."""
    entries = parameter_plans(plan)
    parts = {}
    for name, weight in weights.items():
        entry = replace(entries[name], dtype=dtype_name(weight.dtype))
        parts[name] = local_tensor(entry, weight, plan.mesh, rank)
    return parts


def fill(model: nn.Module, tensors: Mapping[str, Tensor], gradients: bool = False) -> nn.Module:
    """Set parameters (under all tied names) and buffers, and return ``model``.

    Args:
        model: the model on meta.
        tensors: tensors by name.
        gradients: keep ``requires_grad`` of the parameters. By default no parameter requires a gradient.
    """
    aliases: dict[nn.Parameter | None, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            aliases.setdefault(parameter, []).append((module, attribute))
    for name, tensor in tensors.items():
        owner, attribute = owner_of(model, name)
        if attribute in owner._parameters:
            replaced = owner._parameters[attribute]
            real = nn.Parameter(tensor, gradients and replaced is not None and replaced.requires_grad)
            for module, alias in aliases[replaced]:
                module._parameters[alias] = real
        else:
            owner._buffers[attribute] = tensor
    return model


aten = torch.ops.aten

MAPPED_BYTES = 1 << 20
"""Tensors of at least this many bytes get an anonymous memory map."""


class TooLargeToRead(ShardconvError):
    """An operator reads a tensor for which there is not enough memory."""


class RecentReads:
    """Read lazy tensors, and keep the recently read ones.

    Args:
        kept_bytes: most bytes of all kept tensors, unless the last one is larger.
        max_bytes: most bytes of one tensor.
    """

    def __init__(self, kept_bytes: int, max_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._max_bytes = max_bytes
        self._kept: OrderedDict[LazyTensor, Tensor] = OrderedDict()

    def read(self, name: str, lazy: LazyTensor) -> Tensor:
        """Return the numbers of a tensor, in its shape and dtype. They must not be written to.

        Raises:
            TooLargeToRead: if it has more than ``max_bytes``.
            SourceError: if a file cannot be read.
        """
        found = self._kept.pop(lazy, None)
        if found is None:
            if lazy.num_bytes > self._max_bytes:
                raise TooLargeToRead(
                    f"an operator takes {lazy.num_bytes:,} bytes of {name} at once, and {self._max_bytes:,} "
                    "may be taken here"
                )
            held = sum(tensor.nbytes for tensor in self._kept.values())
            while self._kept and held + lazy.num_bytes > self._kept_bytes:
                held -= self._kept.popitem(last=False)[1].nbytes
            # The allocator would keep memory for each thread that has run, more than all memory in use. A
            # mapping goes back to the system when the tensor is dropped.
            dtype = getattr(torch, lazy.dtype)
            if lazy.num_bytes < MAPPED_BYTES:
                found = torch.empty(lazy.shape, dtype=dtype)
            else:
                memory = mmap.mmap(-1, lazy.num_bytes)
                with suppress(AttributeError, OSError):  # a hint that not every system knows
                    memory.madvise(mmap.MADV_HUGEPAGE)
                found = torch.frombuffer(memory, dtype=dtype).view(lazy.shape)
            read_into([lazy], [found])
        self._kept[lazy] = found
        return found


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

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as for any wrapper

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
        """Return a real tensor, which must not be written to.

        Raises:
            ShardconvError: see ``RecentReads.read``.
        """
        return self._parameter.reads.read(self._parameter.fqn, self.lazy)

    @property
    def lazy(self) -> LazyTensor:
        """Return the elements as a lazy tensor.

        Raises:
            ShardconvError: if the parameter was written to since this view of it was taken.
        """
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
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[index] if index < len(args) else kwargs.get(argument.name)
                if isinstance(given, StreamedTensor):
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
    """Replace the parameters of a model by streamed tensors, read its buffers, and return ``model``.

    Args:
        model: the model on meta. A tied parameter is replaced under each name.
        tensors: its parameters and persistent buffers, in its shapes.
        dtype: the dtype to compute in.
        reads: reads the parameters.
    """
    found: dict[str, Tensor] = {}
    for name, lazy in tensors.items():
        owner, attribute = owner_of(model, name)
        wanted = computing(name, lazy, dtype)
        is_parameter = attribute in owner._parameters
        parameter = _Parameter(name, wanted, reads)
        found[name] = StreamedTensor(parameter) if is_parameter else read_tensor(wanted)
    fill(model, found)
    for product in fused_products(model):
        weights, biases = ([m._parameters[name] for m in product.members] for name in ("weight", "bias"))
        product.span(_spanning(weights), _spanning(biases), has_bias=biases[0] is not None)
    return model


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
    wanted = dtype_name(dtype)
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
    """Make a tensor that is computed when it is read. Stacks are computed matrix by matrix.

    Args:
        name: the name for messages.
        dtype: the dtype of the tensor.
        shape: the shape of the tensor.
        compute: returns a span of the first dim, or all of a tensor without dims.
    """
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
    found = func(*args, **kwargs)
    return tree_map_only(RecordedTensor, lambda t: StreamedTensor(source._parameter, t.lazy), found)


def _numbers(value: Any) -> Any:
    return tree_map_only(StreamedTensor, lambda tensor: tensor.numbers(), value)


def _written(name: str) -> ShardconvError:
    return ShardconvError(
        f"the forward pass writes to a part or a copy of the parameter {name}, whose numbers are read from "
        "files each time that they are needed; leave out --numerics"
    )


_SAME = (aten.detach, aten.alias)
"""Operators that return an alias of their argument."""
