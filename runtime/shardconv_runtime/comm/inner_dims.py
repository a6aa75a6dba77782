"""Steps on the known factors of a dim whose open factor is decided by the input."""

from __future__ import annotations

from torch import Tensor

from ..format.dims import Dim, axes_of, size
from ..format.slices import local_size
from .collectives import Axes, Communicator
from .tensor_steps import Gather, Resharding


class Inner:
    """A step on the known factors of a dim: local ``[..., outer * n * inner, ...]`` for any ``n``.

    Backward: that of the step.

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
        known = [local_size(d, comm.mesh, comm.rank) if step is Gather else size(d) for d in (outer, inner)]
        self._sizes = (known[0], -1, known[1])

    def __call__(self, x: Tensor) -> Tensor:
        dim = self.dim % x.dim()
        factors = x.unflatten(dim, self._sizes)  # type: ignore[no-untyped-call]
        factors = factors.movedim((dim, dim + 1, dim + 2), (0, 1, 2))
        return self._step(factors).movedim((0, 1, 2), (dim, dim + 1, dim + 2)).flatten(dim, dim + 2)
