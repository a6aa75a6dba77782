"""Steps on a part of a dim: on the known factors of a dim of which another factor only the input decides."""

from __future__ import annotations

from torch import Tensor

from ..format.dims import Dim, axes_of, size
from ..format.slices import local_size
from .collectives import Axes, Communicator, Gather, Resharding


class Inner:
    """A step on the known part of a dim whose outer or inner factor only the input decides.

    Args:
        step: makes the step for a dim and its layout.
        dim: the tensor dim.
        outer: known outer factors; the open one is between.
        inner: known inner factors.
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
        place = (0, outer) if on_outer else (2, inner)
        self._step = step(comm, *place, grad_axes, local_grad_axes)
        known = [local_size(d, comm.mesh, comm.rank) if step is Gather else size(d) for d in (outer, inner)]
        self._sizes = (known[0], -1, known[1])

    def __call__(self, x: Tensor) -> Tensor:
        dim = self.dim % x.dim()
        split = x.unflatten(dim, self._sizes)  # type: ignore[no-untyped-call]
        split = split.movedim((dim, dim + 1, dim + 2), (0, 1, 2))
        return self._step(split).movedim((0, 1, 2), (dim, dim + 1, dim + 2)).flatten(dim, dim + 2)
