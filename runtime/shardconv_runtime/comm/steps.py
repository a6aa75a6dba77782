"""The steps of a plan on local tensors: linear maps between placements, each next to its adjoint.

``Reduce``, ``Gather``, ``Slice`` and ``ReduceScatter`` have a backward if they are made for training. Without
it, a tensor that requires a gradient is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..format.dims import Dim, Leaf, axes_of, is_partially_sharded, size
from ..format.slices import local_size
from .collectives import Axes, Communicator, refuse_gradient, refuse_second_gradient
from .dim_parts import KnownParts, OpenParts, Parts

Map = Callable[[Tensor], Tensor]


class _Adjoint(torch.autograd.Function):
    """A linear map and its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        """Return ``forward(x)``."""
        ctx.backward_map = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``x`` from the gradient of the result.

        Raises:
            PlanError: autograd records the backward pass, in which gradients of gradients are of other ranks.
        """
        refuse_second_gradient()
        return ctx.backward_map(gradients[0]), None, None


def apply(x: Tensor, forward: Map, backward: Map | None) -> Tensor:
    """Apply a linear map ``forward`` to local ``x`` of any shape; ``backward`` is its adjoint, for gradients.

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
        """Do the same with an ``x`` that nothing else reads, and that may be overwritten."""
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
        local_grad_axes: the same for the other side, if segments of the layout are not sharded.
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
            self.parts: Parts
            if isinstance(layout, Leaf) and not layout.size:
                self.parts = OpenParts(layout, comm.mesh, comm.rank)
            else:
                self.parts = KnownParts(layout, comm.mesh, comm.rank, comm.device)
        self._partial = None if grad_axes is None else comm.real(set(grad_axes) & set(self.axes))
        self._local = comm.real(set(local_grad_axes) & set(self.axes))
        self.is_partially_sharded = is_partially_sharded(layout)
        self.is_of_sequence = bool(self.axes) and isinstance(layout, Leaf) and not layout.size

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_of_sequence or torch.compiler.is_compiling() or self.comm.regathering is None:
            return self.plain(x)
        return self.comm.regathering.reshard(self, x)

    def plain(self, x: Tensor) -> Tensor:
        """Apply the step; autograd keeps the tensors that the step saves."""
        forward, backward = (self.forward, self.backward) if self.axes else (unchanged, unchanged)
        return apply(x, forward, None if self._partial is None else backward)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Apply the step."""

    @abstractmethod
    def backward(self, gradient: Tensor) -> Tensor:
        """Apply the adjoint of the step."""

    def _gather(self, x: Tensor) -> Tensor:
        """Gather shares that ranks with smaller ones pad, since a collective moves equal pieces."""
        dim = self.dim % x.dim()
        padded = self.parts.padded(x, dim)
        return self.parts.joined(self.comm.concatenate(padded[None], self.axes).unbind(), dim)

    def begin_gathering(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to gather ``x``; the returned function waits for the result."""
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


class Gather(Resharding):
    """The step ``all_gather`` of a plan: local ``[..., n, ...]`` to replicated ``[..., size(layout), ...]``.

    Backward: a replicated gradient is sliced, a Partial one is reduced and scattered.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._gather(x)

    def backward(self, gradient: Tensor) -> Tensor:
        assert self._partial is not None
        if self._partial == self.axes:
            shard = self._reduce_scatter(gradient)
        else:
            shard = self._own(self.comm.all_reduce(gradient, self._partial))
        return self._divided(shard, self._local)


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
        return self.comm.all_reduce(self.parts.own_in_zeros(gradient, self.dim % gradient.dim()), replicated)


class ReduceScatter(Resharding):
    """The step ``reduce_scatter`` of a plan: Partial ``[..., size(layout), ...]`` to local ``[..., n, ...]``.

    Backward: the gradient is all-gathered.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._reduce_scatter(x)

    def backward(self, gradient: Tensor) -> Tensor:
        return self._gather(gradient)


def unchanged(x: Tensor) -> Tensor:
    """Return the argument: for steps on the gradient only, and if one rank has all positions."""
    return x


class KeepOnFirst:
    """The step ``keep_on_first`` of a plan, on a local tensor of any shape: Replicate to Partial.

    The first rank along the axes keeps the tensor, the others have zeros, so that the sum is exact. Backward:
    the identity, since the gradient of a Partial is the same on all ranks, as the tensor's gradient must be.

    Args:
        comm: the ranks.
        axes: mesh axes over which the result is Partial.
        training: it has a backward.
    """

    def __init__(self, comm: Communicator, axes: Iterable[int], training: bool = False) -> None:
        self._is_first = comm.rank == comm.group(axes)[0]
        self._back = unchanged if training else None

    def __call__(self, x: Tensor) -> Tensor:
        return apply(x, self._forward, self._back)

    def _forward(self, x: Tensor) -> Tensor:
        return x.view_as(x) if self._is_first else torch.zeros_like(x)


class GradReduce:
    """The step ``grad_all_reduce`` of a plan: the identity on a local tensor of any shape.

    Backward: the gradient, a Partial, is all-reduced. (Megatron-LM's f, arXiv 1909.08053, section 3.)
    """

    def __init__(self, comm: Communicator, axes: Iterable[int]) -> None:
        self.comm = comm
        self.axes = comm.real(axes)

    def __call__(self, x: Tensor) -> Tensor:
        return apply(x, unchanged, self.backward) if self.axes else x

    def backward(self, gradient: Tensor) -> Tensor:
        """Apply the adjoint of the step."""
        return self.comm.all_reduce(gradient, self.axes)


class GradDivide:
    """The step ``grad_divide`` of a plan: the identity on a local tensor of any shape.

    Backward: the gradient, replicated, becomes a Partial with equal terms, divided by the number of ranks.
    """

    def __init__(self, comm: Communicator, axes: Iterable[int]) -> None:
        self._count = comm.num_ranks(axes)

    def __call__(self, x: Tensor) -> Tensor:
        return apply(x, unchanged, self._backward)

    def _backward(self, gradient: Tensor) -> Tensor:
        return gradient / self._count


class Inner:
    """A step on the known factors of a dim: local ``[..., outer * n * inner, ...]`` for any ``n``.

    Backward: the backward of the step.

    Args:
        step: class of the step.
        comm: the ranks.
        dim: the tensor dim.
        outer: known factors outside of the open one; ``outer`` or ``inner`` is sharded.
        inner: known factors inside of it.
        grad_axes, local_grad_axes: see ``Resharding``.
    """

    def __init__(
        self,
        step: type[Resharding],
        comm: Communicator,
        dim: int,
        outer: Dim,
        inner: Dim,
        grad_axes: Axes | None = None,
        local_grad_axes: Axes = (),
    ) -> None:
        self.dim = dim
        on_outer = bool(axes_of(outer))
        factor = (0, outer) if on_outer else (2, inner)
        self._step = step(comm, *factor, grad_axes, local_grad_axes)
        sizes = [local_size(d, comm.mesh, comm.rank) if step is Gather else size(d) for d in (outer, inner)]
        self._sizes = (sizes[0], -1, sizes[1])

    def __call__(self, x: Tensor) -> Tensor:
        return self._on_factors(self._step, x)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the step; it has no backward."""
        return self._on_factors(self._step.forward, x)

    def _on_factors(self, step: Map, x: Tensor) -> Tensor:
        dim = self.dim % x.dim()
        factors = x.unflatten(dim, self._sizes)  # type: ignore[no-untyped-call]
        factors = factors.movedim((dim, dim + 1, dim + 2), (0, 1, 2))
        return step(factors).movedim((0, 1, 2), (dim, dim + 1, dim + 2)).flatten(dim, dim + 2)
