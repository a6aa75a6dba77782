"""Collectives over axes of the mesh, and the layouts that they gather and slice.

Parallel modules call a ``Communicator``; in a job it is a ``ProcessCommunicator``. Its operations have no
backward. The steps of a plan (``Reduce``, ``Gather``, ``Slice``, ``ReduceScatter``) have one if they are
made for training: each is a linear map, and stands beside its adjoint. Without it, a tensor that requires a
gradient is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import torch
import torch.distributed as dist

# Private, but the interface that Dynamo traces without a graph break and that CommDebugMode counts;
# importing it registers the meta kernels of the operators used below. Only this file knows of it.
import torch.distributed._functional_collectives
from torch import Tensor

from ..errors import PlanError
from ..format.dims import Dim, Leaf, axes_of, is_partially_sharded
from ..format.slices import Mesh, group_of

if TYPE_CHECKING:
    from .parts import Parts

_functional = torch.ops._c10d_functional

AllReduce = Callable[[Tensor, str], Tensor]
"""Sums a contiguous tensor of any shape over the process group of this name; does not write to its input."""

Map = Callable[[Tensor], Tensor]

Axes = Iterable[int]

CPU = torch.device("cpu")


class Regathering(Protocol):
    """A forward pass that keeps parts of what it gathers along the sequence (``training/regather.py``)."""

    def reshard(self, step: Resharding, x: Tensor) -> Tensor: ...


class Communicator(ABC):
    """One rank of a mesh, and its collectives.

    Args:
        rank: this rank, row-major in ``mesh``.
        mesh: sizes of the mesh axes.
        device: of the model. Steps allocate what they keep there when they are made: memory that is allocated
            in a call may belong to a CUDA graph.

    Attributes:
        regathering: set while a forward pass runs that keeps parts of what it gathers.
    """

    def __init__(self, rank: int, mesh: Mesh, device: torch.device = CPU) -> None:
        self.rank = rank
        self.mesh = mesh
        self.device = device
        self.regathering: Regathering | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a model communicates with the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise PlanError(
            "a model whose parameters are sharded over ranks cannot be pickled; call save_pretrained or "
            "shardconv_runtime.save on all ranks, or torch.save(model.state_dict()) for this rank's part"
        )

    def group(self, axes: Iterable[int]) -> tuple[int, ...]:
        """The ranks that differ from this one in ``axes`` only, in coordinate order."""
        return group_of(self.mesh, axes, self.rank)

    def num_ranks(self, axes: Iterable[int]) -> int:
        """Number of ranks along ``axes``."""
        count = 1
        for axis in axes:  # a plain loop, which compilers can look through
            count *= self.mesh[axis]
        return count

    def real(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Those axes, ascending, along which there is more than one rank."""
        return tuple(sorted(a for a in axes if self.mesh[a] > 1))

    def all_reduce(self, x: Tensor, axes: tuple[int, ...], *, overwrite: bool = False) -> Tensor:
        """Sum over the ranks along ``axes``, of ``x``'s shape and dtype: Partial to Replicate. No backward.

        Args:
            x: local, of any shape, the same on each rank.
            axes: mesh axes, ascending; none (or axes of extent 1) makes this the identity.
            overwrite: nothing else reads ``x``, so that the sum may take its memory. A compiler finds this
                out by itself, and gets the operation that keeps ``x``.

        Raises:
            PlanError: ``x`` requires a gradient; likewise below.
        """
        refuse_gradient(x)
        if self.num_ranks(axes) == 1:
            return x
        if overwrite and not torch.compiler.is_compiling():
            return self._sum_in_place(x.contiguous(), axes)
        return self._sum(x.contiguous(), axes)

    def all_gather(self, x: Tensor, dim: int, layout: Dim) -> Tensor:
        """All positions of a dim, in global order: Shard to Replicate. No backward.

        Args:
            x: local ``[..., local size of layout, ...]``; the result has ``[..., size(layout), ...]``.
            dim: the tensor dim that is laid out as ``layout``.
        """
        return Gather(self, dim, layout)(x)

    def concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Local ``[n, ...]`` of ``p`` ranks along ``axes``, in order, as ``[p * n, ...]``. No backward."""
        refuse_gradient(x)
        if self.num_ranks(axes) == 1:
            return x
        return self._concatenate(x.contiguous(), axes)

    def begin_concatenating(self, x: Tensor, axes: tuple[int, ...]) -> Callable[[], Tensor]:
        """``concatenate``, begun: the returned function waits for the result."""
        found = self.concatenate(x, axes)
        return lambda: found

    def reduce_scatter(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """``[p * n, ...]`` summed over ``p`` ranks along ``axes``: this rank's ``[n, ...]``. No backward."""
        refuse_gradient(x)
        if self.num_ranks(axes) == 1:
            return x
        return self._reduce_scatter(x.contiguous(), axes)

    @abstractmethod
    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Sum of a contiguous tensor of any shape over two or more ranks; does not write to ``x``."""

    def _sum_in_place(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """As ``_sum``, for an ``x`` that may be overwritten."""
        return self._sum(x, axes)

    @abstractmethod
    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Concatenation of contiguous ``[n, ...]`` along dim 0 over two or more ranks."""

    def _reduce_scatter(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Sum of contiguous ``[p * n, ...]`` over ``p`` ranks, two or more: this rank's ``[n, ...]``."""
        parts = self._sum(x, axes).chunk(self.num_ranks(axes))
        return parts[self.group(axes).index(self.rank)].clone()


class ProcessCommunicator(Communicator):
    """Ranks that are processes of ``torch.distributed``.

    Args:
        groups: the process group of this rank, for each tuple of axes that is used.
        all_reduce: used in place of torch's own.
        device: see ``Communicator``.
    """

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        all_reduce: AllReduce | None = None,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(rank, mesh, device)
        self.groups = dict(groups)
        self._names = {axes: group.group_name for axes, group in groups.items()}
        self._all_reduce = all_reduce

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        if self._all_reduce is not None:
            return self._all_reduce(x, self._names[axes])
        return _wait(_functional.all_reduce(x, "sum", self._names[axes]))

    def _sum_in_place(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        if self._all_reduce is not None:
            return self._sum(x, axes)
        dist.all_reduce(x, group=self.groups[axes])
        return x

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return _wait(_functional.all_gather_into_tensor(x, self.num_ranks(axes), self._names[axes]))

    def begin_concatenating(self, x: Tensor, axes: tuple[int, ...]) -> Callable[[], Tensor]:
        """See ``Communicator``."""
        pending = _functional.all_gather_into_tensor(x.contiguous(), self.num_ranks(axes), self._names[axes])
        return lambda: _wait(pending)

    def _reduce_scatter(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return _wait(_functional.reduce_scatter_tensor(x, "sum", self.num_ranks(axes), self._names[axes]))


class _Adjoint(torch.autograd.Function):
    """A linear map and its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        """``forward(x)``."""
        ctx.backward_map = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of ``x`` from the gradient of the result."""
        return ctx.backward_map(gradients[0]), None, None


def apply(x: Tensor, forward: Map, backward: Map | None) -> Tensor:
    """``forward(x)`` of a linear map, ``x`` local of any shape; its adjoint ``backward`` takes the gradient.

    Raises:
        PlanError: ``x`` requires a gradient, and ``backward`` is None.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return forward(x)
    if backward is None:
        refuse_gradient(x)
    result: Tensor = _Adjoint.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


class Reduce:
    """The step ``all_reduce`` of a plan, on a local tensor of any shape: Partial to Replicate.

    Backward: the gradient, all-reduced over ``grad_axes``; unchanged over the other axes.

    Args:
        comm: the ranks.
        axes: mesh axes to sum over.
        grad_axes: mesh axes over which the gradient of the sum is Partial; None: no backward.
    """

    def __init__(self, comm: Communicator, axes: Iterable[int], grad_axes: Axes | None = None) -> None:
        self.comm = comm
        self.axes = comm.real(axes)
        self._back = None if grad_axes is None else comm.real(set(grad_axes) & set(self.axes))

    def __call__(self, x: Tensor) -> Tensor:
        return apply(x, self._forward, self._backward if self._back is not None else None) if self.axes else x

    def overwriting(self, x: Tensor) -> Tensor:
        """The same for an ``x`` that nothing else reads: it may be overwritten."""
        if torch.is_grad_enabled() and x.requires_grad:
            return self(x)
        return self.comm.all_reduce(x, self.axes, overwrite=True) if self.axes else x

    def _forward(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x, self.axes)

    def _backward(self, gradient: Tensor) -> Tensor:
        assert self._back is not None
        return self.comm.all_reduce(gradient, self._back)


class Resharding(ABC):
    """A step between all positions of a dim, ``[..., size(layout), ...]``, and this rank's part of them.

    Args:
        comm: the ranks.
        dim: the tensor dim that is laid out as ``layout``.
        layout: how it is sharded.
        grad_axes: mesh axes over which the gradient of the side with all positions is Partial; None: no
            backward.
        local_grad_axes: the same for the other side, where segments of the layout are not sharded.
    """

    def __init__(
        self,
        comm: Communicator,
        dim: int,
        layout: Dim,
        grad_axes: Axes | None = None,
        local_grad_axes: Axes = (),
    ) -> None:
        self.comm = comm
        self.dim = dim
        self.axes = comm.real(axes_of(layout))
        if self.axes:
            self.parts = _parts_of(layout, comm)
        self._partial = None if grad_axes is None else comm.real(set(grad_axes) & set(self.axes))
        self._local = comm.real(set(local_grad_axes) & set(self.axes))
        self.is_partially_sharded = is_partially_sharded(layout)
        self.is_of_sequence = bool(self.axes) and isinstance(layout, Leaf) and not layout.size

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_of_sequence or torch.compiler.is_compiling() or self.comm.regathering is None:
            return self.plain(x)
        return self.comm.regathering.reshard(self, x)

    def plain(self, x: Tensor) -> Tensor:
        """The step, of which autograd keeps what it saves."""
        forward, backward = (self.forward, self.backward) if self.axes else (unchanged, unchanged)
        return apply(x, forward, None if self._partial is None else backward)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The step itself."""

    @abstractmethod
    def backward(self, gradient: Tensor) -> Tensor:
        """Its adjoint."""

    def _gather(self, x: Tensor) -> Tensor:
        """Ranks with smaller shares pad theirs, since a collective moves equal pieces; joining them drops the
        padding. The tensor is sent as it lies in memory: moving the dim to the front would copy the input and
        the result in short strides."""
        dim = self.dim % x.dim()
        padded = self.parts.padded(x, dim)
        return self.parts.joined(self.comm.concatenate(padded[None], self.axes).unbind(), dim)

    def begin_gathering(self, x: Tensor) -> Callable[[], Tensor]:
        """The gather of ``x``, begun: the returned function waits for the result."""
        dim = self.dim % x.dim()
        finish = self.comm.begin_concatenating(self.parts.padded(x, dim)[None], self.axes)
        return lambda: self.parts.joined(finish().unbind(), dim)

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        dim = self.dim % x.dim()
        pieces = torch.cat(self.parts.separated(x, dim))
        return self.parts.unpadded(self.comm.reduce_scatter(pieces, self.axes), dim)

    def _divided(self, x: Tensor, axes: Axes) -> Tensor:
        return self.parts.divided(x, self.dim % x.dim(), axes) if self.is_partially_sharded and axes else x

    def _own(self, x: Tensor) -> Tensor:
        return self.parts.own(x, self.dim % x.dim())

    def _own_in_zeros(self, x: Tensor) -> Tensor:
        return self.parts.own_in_zeros(x, self.dim % x.dim())


def _parts_of(layout: Dim, comm: Communicator) -> Parts:
    """The parts of a dim of this layout."""
    if isinstance(layout, Leaf) and not layout.size:
        from .open_parts import OpenParts

        return OpenParts(layout, comm.mesh, comm.rank)
    from .parts import KnownParts  # a single rank needs none

    return KnownParts(layout, comm.mesh, comm.rank, comm.device)


class Gather(Resharding):
    """The step ``all_gather`` of a plan: local ``[..., n, ...]`` to replicated ``[..., size(layout), ...]``.

    Backward: a replicated gradient is sliced, a Partial one is reduced and scattered.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._gather(x)

    def backward(self, gradient: Tensor) -> Tensor:
        assert self._partial is not None
        if self._partial == self.axes:
            own = self._reduce_scatter(gradient)
        else:
            own = self._own(self.comm.all_reduce(gradient, self._partial))
        return self._divided(own, self._local)


class Slice(Resharding):
    """The step ``slice`` of a plan: replicated ``[..., size(layout), ...]`` to local ``[..., n, ...]``.

    Backward: the gradient is all-gathered; over ``grad_axes`` it becomes a Partial: its part in zeros.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._own(x)

    def backward(self, gradient: Tensor) -> Tensor:
        if not self._partial and not self._local:
            return self._gather(gradient)
        gradient = self._divided(gradient, [a for a in self.axes if a not in self._local])
        replicated = tuple(a for a in self.axes if a not in (self._partial or ()))
        return self.comm.all_reduce(self._own_in_zeros(gradient), replicated)


class ReduceScatter(Resharding):
    """The step ``reduce_scatter`` of a plan: Partial ``[..., size(layout), ...]`` to local ``[..., n, ...]``.

    Backward: the gradient is all-gathered.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._reduce_scatter(x)

    def backward(self, gradient: Tensor) -> Tensor:
        return self._gather(gradient)


def refuse_gradient(x: Tensor) -> None:
    """Stop before autograd records an operation on ``x`` (of any shape) that has no backward.

    Raises:
        PlanError: gradients are enabled and ``x`` requires one.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise PlanError(
            "the model was loaded for inference: it has no gradient collectives, so that a backward pass "
            "would be wrong; load it with training=True, or run it under torch.no_grad()"
        )


def unchanged(x: Tensor) -> Tensor:
    """The identity on any shape, for steps on the gradient alone, and where one rank has all positions."""
    return x


def _wait(x: Tensor) -> Tensor:
    out: Tensor = _functional.wait_tensor(x)
    return out
