"""How a tensor dim is sharded into the ranks' parts and put together again, without any communication.

A known layout may be uneven and in many pieces. An open one (a sequence, whose length is decided by the
input) has equal parts, in the order of the ranks.

Shapes below: ``n`` is this rank's number of positions of the dim, ``m`` the largest of any rank, ``N`` the
global number, and ``...`` are the other dims. Dtypes stay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RefusedCallError
from ..format.dims import Dim, Leaf, axes_of, to_text
from ..format.slices import Mesh, Range, coordinates, gather_index, group_of, local_segments, ranges

MAX_CONCATENATED = 64
"""Up to this many ranges are put together with ``torch.cat``; more with one ``index_select``."""


class Parts(ABC):
    """The parts of one tensor dim, on one rank.

    Attributes:
        axes: the mesh axes (of extent above 1) that shard the dim, ascending.
        text: the layout, for messages.
    """

    def __init__(self, layout: Dim, mesh: Mesh) -> None:
        self.axes = tuple(sorted(a for a in axes_of(layout) if mesh[a] > 1))
        self.text = to_text(layout)

    @abstractmethod
    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part: ``[..., N, ...]`` to local, contiguous ``[..., n, ...]``."""

    @abstractmethod
    def own_in_zeros(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part at its positions in zeros: local ``[..., n, ...]`` to ``[..., N, ...]``."""

    @abstractmethod
    def padded(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part, padded with zeros: local ``[..., n, ...]`` to ``[..., m, ...]``."""

    @abstractmethod
    def unpadded(self, x: Tensor, dim: int) -> Tensor:
        """Return the inverse of ``padded``: ``[..., m, ...]`` to local ``[..., n, ...]``."""

    @abstractmethod
    def joined(self, members: tuple[Tensor, ...], dim: int) -> Tensor:
        """Return ``[..., N, ...]`` from the padded parts ``[..., m, ...]`` of the ranks along ``axes``."""

    @abstractmethod
    def separated(self, x: Tensor, dim: int) -> list[Tensor]:
        """Return the padded parts ``[..., m, ...]`` of the ranks along ``axes`` from ``[..., N, ...]``."""

    @abstractmethod
    def divided(self, x: Tensor, dim: int, axes: Iterable[int]) -> Tensor:
        """Divide ``[..., n, ...]`` by the number of ranks along ``axes`` that do not shard a position."""

    def _require(self, x: Tensor, dim: int, expected: int) -> None:
        if x.shape[dim] != expected:
            raise RefusedCallError(
                f"dim {dim} laid out as {self.text}: expected {expected} positions there, got a tensor of "
                f"shape {tuple(x.shape)}; the plan does not fit the model code, or the model was called in a "
                "way that was not traced"
            )


class KnownParts(Parts):
    """Parts of a dim whose sizes are known, of tensors that are on ``device`` mostly."""

    def __init__(self, layout: Dim, mesh: Mesh, rank: int, device: torch.device) -> None:
        super().__init__(layout, mesh)
        index = gather_index(layout, mesh)
        self._size = sum(p.stop - p.start for p in index.pieces)
        self._ranges = ranges(layout, mesh, rank)
        self._local = sum(stop - start for start, stop in self._ranges)
        self._largest = max(index.sizes)
        self._select = Select(self._ranges, device)
        self._pieces = index.pieces
        many = len(index.pieces) > MAX_CONCATENATED
        self._join = Select(index.ranges(self._largest), device) if many else None
        self._layout, self._mesh, self._rank = layout, mesh, rank
        members = group_of(mesh, self.axes, rank)
        self._members = [Select(ranges(layout, mesh, member), device) for member in members]

    def own(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        self._require(x, dim, self._size)
        return self._select(x, dim)

    def own_in_zeros(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        self._require(x, dim, self._local)
        shape = list(x.shape)
        shape[dim] = self._size
        return self._select.put(x, x.new_zeros(shape), dim)

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        self._require(x, dim, self._local)
        return padded_to(x, dim, self._largest)

    def unpadded(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        return x.narrow(dim, 0, self._local).clone() if self._local < self._largest else x

    def joined(self, members: tuple[Tensor, ...], dim: int) -> Tensor:
        """See ``Parts``."""
        if self._join is not None:
            return self._join(torch.cat(members, dim), dim)
        return torch.cat([members[m].narrow(dim, a, b - a) for m, a, b in self._pieces], dim)

    def separated(self, x: Tensor, dim: int) -> list[Tensor]:
        """See ``Parts``."""
        self._require(x, dim, self._size)
        return [padded_to(select(x, dim), dim, self._largest) for select in self._members]

    def divided(self, x: Tensor, dim: int, axes: Iterable[int]) -> Tensor:
        """See ``Parts``."""
        divided_axes = frozenset(axes)
        pieces = [
            x.narrow(dim, start, stop - start) / math.prod(self._mesh[a] for a in divided_axes - sharded)
            for (start, stop), sharded in local_segments(self._layout, self._mesh, self._rank)
        ]
        return torch.cat(pieces, dim) if pieces else x


class Select:
    """Takes ranges of positions of a dim, in order: ``[..., N, ...]`` to contiguous ``[..., n, ...]``."""

    def __init__(self, parts: tuple[Range, ...], device: torch.device) -> None:
        self.ranges = parts
        self._index: Tensor | None = None
        if len(parts) > MAX_CONCATENATED:
            positions = [torch.arange(start, stop, device="cpu") for start, stop in parts]
            self._index = torch.cat(positions).to(device)

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        if self._index is not None:
            return x.index_select(dim, self._index_on(x.device))
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            return x.narrow(dim, start, stop - start).contiguous()
        if not self.ranges:
            return x.narrow(dim, 0, 0)
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.ranges], dim)

    def put(self, x: Tensor, out: Tensor, dim: int) -> Tensor:
        """Write ``x: [..., n, ...]`` to its positions in ``out: [..., N, ...]``, inverting the selection."""
        if self._index is not None:
            return out.index_copy_(dim, self._index_on(x.device), x)
        done = 0
        for start, stop in self.ranges:
            out.narrow(dim, start, stop - start).copy_(x.narrow(dim, done, stop - start))
            done += stop - start
        return out

    def _index_on(self, device: torch.device) -> Tensor:
        assert self._index is not None
        if self._index.device != device:
            self._index = self._index.to(device)
        return self._index


def padded_to(x: Tensor, dim: int, size: int) -> Tensor:
    """Append zeros to a dim: ``x: [..., n, ...]`` to ``[..., size, ...]``."""
    if x.shape[dim] == size:
        return x
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (0, size - x.shape[dim]))


# Parts of a dim whose size is decided by the input: a sequence.


class OpenParts(Parts):
    """Equal parts of a dim whose size is decided by the input; the number of ranks divides it."""

    def __init__(self, layout: Leaf, mesh: Mesh, rank: int) -> None:
        super().__init__(layout, mesh)
        self._count = math.prod(mesh[a] for a in self.axes)
        self._index = 0
        for axis in self.axes:
            self._index = self._index * mesh[axis] + coordinates(mesh, rank)[axis]

    def own(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        share = self._share(x, dim)
        return x.narrow(dim, self._index * share, share).contiguous()

    def own_in_zeros(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        share = x.shape[dim]
        before, after = self._index * share, (self._count - self._index - 1) * share
        return F.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (before, after))

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        return x

    def unpadded(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        return x

    def joined(self, members: tuple[Tensor, ...], dim: int) -> Tensor:
        """See ``Parts``."""
        return torch.cat(members, dim)

    def separated(self, x: Tensor, dim: int) -> list[Tensor]:
        """See ``Parts``."""
        return list(torch.split(x, self._share(x, dim), dim))

    def divided(self, x: Tensor, dim: int, axes: Iterable[int]) -> Tensor:
        """See ``Parts``."""
        return x

    def _share(self, x: Tensor, dim: int) -> int:
        size = x.shape[dim]
        if size % self._count:
            raise RefusedCallError(
                f"a sequence of {size} positions cannot be sharded evenly over {self._count} ranks; "
                "the model was called in a way in which its inputs were not padded"
            )
        return size // self._count
