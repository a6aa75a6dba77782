"""The part of a weight that a rank holds, and the corresponding part of its stored tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..format.plan import PackedDim, PackedTensor
from ..format.slices import Range


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A part of a weight."""

    shape: tuple[int, ...]
    """The global shape."""
    ranges: tuple[tuple[Range, ...], ...]
    """The held global positions of each dim, ascending."""

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> WeightSlice:
        """Make the slice that is all of a weight of this global shape."""
        return cls(shape, tuple(((0, size),) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        return tuple(sum(b - a for a, b in spans) for spans in self.ranges)

    def positions(self, dim: int) -> Tensor:
        """Return global positions along a dim, int64 ``[local size]``, ascending."""
        spans = [torch.arange(a, b) for a, b in self.ranges[dim]]
        return torch.cat(spans) if spans else torch.arange(0)

    def rows(self, start: int, stop: int) -> WeightSlice:
        """Return the part with only these local positions of the first dim."""
        kept, offset = [], 0
        for a, b in self.ranges[0]:
            first, last = a + max(start - offset, 0), a + min(stop - offset, b - a)
            kept += [(first, last)] if first < last else []
            offset += b - a
        return WeightSlice(self.shape, (tuple(kept), *self.ranges[1:]))

    def local_steps(self, dim: int, step: int) -> Tensor:
        """Return the local step of each local position along a dim, int64 ``[local size]``."""
        local: Tensor = torch.unique_consecutive(self.positions(dim) // step, return_inverse=True)[1]
        return local


def stored_positions(dim: PackedDim, held: WeightSlice) -> Tensor:
    """Return global positions along a dim of a stored tensor that belong to the part, int64, ascending."""
    if dim.of is None:
        return torch.arange(dim.step)
    positions: Tensor = torch.unique_consecutive(held.positions(dim.of) // dim.step)
    return positions


def stored_shape(stored: PackedTensor, held: WeightSlice) -> tuple[int, ...]:
    """Return local shape of a stored tensor."""
    return tuple(len(stored_positions(dim, held)) for dim in stored.dims)


def spread(values: Tensor, stored: PackedTensor, held: WeightSlice) -> Tensor:
    """Repeat a stored tensor to the part of the weight, so that the two broadcast.

    Args:
        values: local, in the shape of the dims of ``stored``, each of which runs along its own dim of the
            weight or has one position.

    Returns:
        One dim for each of the weight, of its local size, or 1 if no stored dim runs along it.
    """
    for place, dim in enumerate(stored.dims):
        if dim.of is not None and dim.step > 1:
            values = values.index_select(place, held.local_steps(dim.of, dim.step).to(values.device))
    along = {dim.of: place for place, dim in enumerate(stored.dims) if dim.of is not None}
    others = [place for place, dim in enumerate(stored.dims) if dim.of is None]
    shape = [values.shape[along[dim]] if dim in along else 1 for dim in range(len(held.shape))]
    return values.permute([*(along[dim] for dim in sorted(along)), *others]).reshape(shape)


def along(of: int, step: int, size: int) -> PackedDim:
    """Return the dim of factors that ``step`` of ``size`` positions in dim ``of`` of the weight share.

    A single factor is whole on each rank: it limits no shards.
    """
    return PackedDim(of, step) if step < size else PackedDim(None, 1)


def num_steps(step: int, size: int) -> int:
    """Return the number of steps in a dim; the last one may be shorter."""
    return math.ceil(size / step)
