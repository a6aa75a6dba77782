"""Collectives over axes of the mesh, and the layouts that they gather and slice.

``Communicator`` is what the parallel modules talk to; ``ProcessCommunicator`` is the real one. No
operation here has a backward: plans of this version are for inference, and a tensor that needs
a gradient is refused instead of getting a wrong one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist

# Private, but the interface that Dynamo traces without a graph break and that CommDebugMode counts;
# importing it registers the meta kernels of the operators used below. Only this file knows of it.
import torch.distributed._functional_collectives
import torch.nn.functional as F
from torch import Tensor

from .errors import PlanError
from .slices import Dim, Mesh, Range, axes_of, gather_index, group_of, local_size, ranges, size, to_text

_functional = torch.ops._c10d_functional

AllReduce = Callable[[Tensor, str], Tensor]
"""Sums a contiguous tensor, which stays as it is, over the process group of this name."""

MAX_CONCATENATED = 64
"""Up to so many ranges are put together with ``torch.cat``; more with one ``index_select``."""


class Communicator(ABC):
    """One rank of a mesh, and its collectives.

    Args:
        rank: this rank, row-major in ``mesh``.
        mesh: sizes of the mesh axes.
    """

    def __init__(self, rank: int, mesh: Mesh) -> None:
        self.rank = rank
        self.mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a model talks to the same ranks."""
        return self

    def group(self, axes: Iterable[int]) -> tuple[int, ...]:
        """The ranks that differ from this one in ``axes`` only, in coordinate order."""
        return group_of(self.mesh, axes, self.rank)

    def num_ranks(self, axes: Iterable[int]) -> int:
        """Number of ranks along ``axes``."""
        count = 1
        for axis in axes:  # a plain loop, which compilers can look through
            count *= self.mesh[axis]
        return count

    def all_reduce(self, x: Tensor, axes: tuple[int, ...], *, overwrite: bool = False) -> Tensor:
        """Sum over the ranks along ``axes``: Partial to Replicate. No backward.

        Args:
            x: any shape, the same on each rank.
            axes: mesh axes, ascending; none (or axes of extent 1) makes this the identity.
            overwrite: nobody else reads ``x``, so that the sum may take its memory. Compilers find out
                by themselves, and get the operation that keeps it.
        """
        refuse_gradient(x)
        if self.num_ranks(axes) == 1:
            return x
        if overwrite and not torch.compiler.is_compiling():
            return self._sum_in_place(x.contiguous(), axes)
        return self._sum(x.contiguous(), axes)

    def all_gather(self, x: Tensor, dim: int, layout: Dim) -> Tensor:
        """The whole of a dim, in global order: Shard to Replicate. No backward.

        Args:
            x: local part, ``[..., local size of layout, ...]``.
            dim: the tensor dim that is laid out as ``layout``.
        """
        return Gather(self, dim, layout)(x)

    def concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """``[n, ...]`` of each of ``p`` ranks along ``axes`` as ``[p * n, ...]``, in coordinate order."""
        refuse_gradient(x)
        if self.num_ranks(axes) == 1:
            return x
        return self._concatenate(x.contiguous(), axes)

    @abstractmethod
    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Sum of a contiguous tensor over a group of two or more ranks; ``x`` stays as it is."""

    def _sum_in_place(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """As ``_sum``, for an ``x`` that may be overwritten."""
        return self._sum(x, axes)

    @abstractmethod
    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Concatenation along dim 0 over a group of two or more ranks."""


class ProcessCommunicator(Communicator):
    """Ranks that are processes of ``torch.distributed``.

    Args:
        groups: the process group of this rank, for each tuple of axes that is used.
        all_reduce: takes the place of torch's own.
    """

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        all_reduce: AllReduce | None = None,
    ) -> None:
        super().__init__(rank, mesh)
        self._groups = dict(groups)
        self._names = {axes: group.group_name for axes, group in groups.items()}
        self._all_reduce = all_reduce

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        if self._all_reduce is not None:
            return self._all_reduce(x, self._names[axes])
        return _wait(_functional.all_reduce(x, "sum", self._names[axes]))

    def _sum_in_place(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        if self._all_reduce is not None:
            return self._sum(x, axes)
        dist.all_reduce(x, group=self._groups[axes])
        return x

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return _wait(_functional.all_gather_into_tensor(x, self.num_ranks(axes), self._names[axes]))


class Reduce:
    """The step ``all_reduce`` of a plan."""

    def __init__(self, comm: Communicator, axes: Iterable[int]) -> None:
        self.comm = comm
        self.axes = tuple(sorted(a for a in axes if comm.mesh[a] > 1))

    def __call__(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x, self.axes) if self.axes else x

    def overwriting(self, x: Tensor) -> Tensor:
        """The same for an ``x`` that nobody else reads: it may be overwritten."""
        return self.comm.all_reduce(x, self.axes, overwrite=True) if self.axes else x


class Gather:
    """The step ``all_gather`` of a plan: local ``[..., n, ...]`` to global ``[..., size(layout), ...]``.

    Ranks with smaller shares pad theirs, since a collective moves equal pieces; the padding is cut
    off while the pieces are put in order. What is communicated is the tensor as it lies in memory: moving the
    dim to the front would copy it, and what comes back, in short strides.
    """

    def __init__(self, comm: Communicator, dim: int, layout: Dim) -> None:
        self.comm = comm
        self.dim = dim
        self.axes = tuple(sorted(a for a in axes_of(layout) if comm.mesh[a] > 1))
        self._what = f"all_gather of dim {dim} laid out as {to_text(layout)}"
        index = gather_index(layout, comm.mesh) if self.axes else None
        self._local = local_size(layout, comm.mesh, comm.rank)
        self._largest = max(index.sizes) if index else self._local
        self._pieces = index.pieces if index else ()
        many = index is not None and len(index.pieces) > MAX_CONCATENATED
        self._select = Select(index.ranges(self._largest)) if index is not None and many else None

    def __call__(self, x: Tensor) -> Tensor:
        refuse_gradient(x)
        _check_extent(x, self.dim, self._local, self._what)
        if not self.axes:
            return x
        dim = self.dim % x.dim()
        if self._largest > self._local:
            x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, self._largest - self._local))
        members = self.comm.concatenate(x[None], self.axes).unbind()
        if self._select is not None:
            return self._select(torch.cat(members, dim), dim)
        return torch.cat([members[m].narrow(dim, a, b - a) for m, a, b in self._pieces], dim)


class Slice:
    """The step ``slice`` of a plan: global ``[..., size(layout), ...]`` to this rank's part of it."""

    def __init__(self, comm: Communicator, dim: int, layout: Dim) -> None:
        self.dim = dim
        self._what = f"slice of dim {dim} laid out as {to_text(layout)}"
        self._size = size(layout)
        self._select = Select(ranges(layout, comm.mesh, comm.rank))

    def __call__(self, x: Tensor) -> Tensor:
        refuse_gradient(x)
        _check_extent(x, self.dim, self._size, self._what)
        return self._select(x, self.dim)


class Inner:
    """A step on the known part of a dim whose outer or inner factor only the input decides.

    Args:
        step: makes the step for a dim and its layout: ``Gather`` or ``Slice``.
        dim: the tensor dim.
        outer: known outer factors; the open one is between.
        inner: known inner factors.
    """

    def __init__(
        self, step: type[Gather] | type[Slice], comm: Communicator, dim: int, outer: Dim, inner: Dim
    ) -> None:
        self.dim = dim
        on_outer = bool(axes_of(outer))
        self._step = step(comm, 0 if on_outer else 2, outer if on_outer else inner)
        known = [size(d) if step is Slice else local_size(d, comm.mesh, comm.rank) for d in (outer, inner)]
        self._sizes = (known[0], -1, known[1])

    def __call__(self, x: Tensor) -> Tensor:
        dim = self.dim % x.dim()
        split = x.unflatten(dim, self._sizes)  # type: ignore[no-untyped-call]
        split = split.movedim((dim, dim + 1, dim + 2), (0, 1, 2))
        return self._step(split).movedim((0, 1, 2), (dim, dim + 1, dim + 2)).flatten(dim, dim + 2)


class Select:
    """Takes ranges of positions of a dim, in order; the result is contiguous, as model code expects."""

    def __init__(self, parts: tuple[Range, ...]) -> None:
        self.ranges = parts
        self._index: Tensor | None = None
        if len(parts) > MAX_CONCATENATED:
            positions = [torch.arange(start, stop, device="cpu") for start, stop in parts]
            self._index = torch.cat(positions)

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        if self._index is not None:
            return x.index_select(dim, self._index_on(x.device))
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            return x.narrow(dim, start, stop - start).contiguous()
        if not self.ranges:
            return x.narrow(dim, 0, 0)
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.ranges], dim)

    def _index_on(self, device: torch.device) -> Tensor:
        assert self._index is not None
        if self._index.device != device:
            self._index = self._index.to(device)
        return self._index


def refuse_gradient(x: Tensor) -> None:
    """Stop before autograd records an operation whose backward this version does not have.

    Raises:
        PlanError: gradients are enabled and ``x`` needs one.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise PlanError(
            "this plan was solved for inference: it has no gradient collectives, so that a backward pass "
            "would be wrong; run the model under torch.no_grad() and leave requires_grad of its "
            "parameters and inputs off"
        )


def _check_extent(x: Tensor, dim: int, expected: int, what: str) -> None:
    if x.shape[dim] != expected:
        raise PlanError(
            f"{what}: expected {expected} positions there, got a tensor of shape {tuple(x.shape)}; "
            "the plan does not fit the model code, or the model was called in a way that was not traced"
        )


def _wait(x: Tensor) -> Tensor:
    out: Tensor = _functional.wait_tensor(x)
    return out
