"""The stored tensors of packed weights: how a format finds them, and the part of them that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import SourceError
from ..format.plan import PackedDim, PackedTensor, Packing
from ..format.slices import Range

# The part of a weight that a rank holds, and the corresponding part of its stored tensors.


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
        dims, offset = [], 0
        for a, b in self.ranges[0]:
            first, last = a + max(start - offset, 0), a + min(stop - offset, b - a)
            dims += [(first, last)] if first < last else []
            offset += b - a
        return WeightSlice(self.shape, (tuple(dims), *self.ranges[1:]))

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
    other_dims = [place for place, dim in enumerate(stored.dims) if dim.of is None]
    shape = [values.shape[along[dim]] if dim in along else 1 for dim in range(len(held.shape))]
    return values.permute([*(along[dim] for dim in sorted(along)), *other_dims]).reshape(shape)


def along(of: int, step: int, size: int) -> PackedDim:
    """Return the dim of factors that ``step`` of ``size`` positions in dim ``of`` of the weight share.

    A single factor is whole on each rank: it limits no shards.
    """
    return PackedDim(of, step) if step < size else PackedDim(None, 1)


def num_steps(step: int, size: int) -> int:
    """Return the number of steps in a dim; the last one may be shorter."""
    return math.ceil(size / step)


@dataclass(frozen=True, slots=True)
class Info:
    """Shape and dtype of a tensor in the header of a file."""

    shape: tuple[int, ...]
    """Global."""
    dtype: str
    """torch's name."""


class Checkpoint(Protocol):
    """The tensors of an ordinary checkpoint."""

    @property
    def tensors(self) -> Mapping[str, Info]:
        """Return shape and dtype of all tensors by their names."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Return the metadata in the headers of the files."""

    def read(self, name: str) -> Tensor:
        """Return a tensor's values; formats read small ones only."""


@dataclass(frozen=True, slots=True)
class Found:
    """A packed parameter of a checkpoint."""

    shape: tuple[int, ...]
    """Global shape of the weight."""
    packing: Packing
    tensors: dict[str, str]
    """Name of a tensor in the packing -> its name in the checkpoint."""


REMEDY = "; convert the unquantized model, or download the checkpoint again if it is damaged"


class StoredGroup:
    """The stored tensors of one parameter, checked while they are described."""

    def __init__(self, checkpoint: Checkpoint, shape: tuple[int, ...], names: Mapping[str, str]) -> None:
        # names: name of a tensor in the packing -> its name in the checkpoint.
        self._checkpoint = checkpoint
        self._shape = shape
        self._names = dict(names)
        self._stored: list[PackedTensor] = []
        first = next(iter(names.values()))
        for name in names.values():
            info(checkpoint, name, first)

    def add(
        self, name: str, dtypes: Collection[str], dims: tuple[PackedDim, ...], shape: tuple[int, ...] = ()
    ) -> None:
        """Describe a tensor."""
        full = self._names[name]
        stored = self._checkpoint.tensors[full]
        expected = shape or tuple(global_size(dim, self._shape) for dim in dims)
        if stored.dtype not in dtypes or stored.shape != expected:
            raise SourceError(
                f"{full} is {stored.dtype} {list(stored.shape)}, and should be {' or '.join(dtypes)} "
                f"{list(expected)} for a weight of {list(self._shape)}{REMEDY}"
            )
        self._stored.append(PackedTensor(name, stored.dtype, dims, shape))

    def found(self, method: str, **settings: int) -> Found:
        """Return the parameter, of all tensors that were added."""
        packing = Packing(method, tuple(self._stored), tuple(settings.items()))
        return Found(self._shape, packing, {stored.name: self._names[stored.name] for stored in self._stored})


def global_size(dim: PackedDim, shape: tuple[int, ...]) -> int:
    """Return the size of a dim of a stored tensor of a weight of this global shape."""
    return dim.step if dim.of is None else -(-shape[dim.of] // dim.step)


def info(checkpoint: Checkpoint, name: str, owner: str) -> Info:
    """Return the shape and dtype of a tensor that belongs to ``owner``."""
    try:
        return checkpoint.tensors[name]
    except KeyError:
        raise SourceError(f"{name} is missing from the checkpoint, which has {owner}{REMEDY}") from None


def matrix(checkpoint: Checkpoint, name: str, owner: str) -> tuple[int, int]:
    """Return the shape of a tensor of two dims that belongs to ``owner``."""
    shape = info(checkpoint, name, owner).shape
    if len(shape) != 2:
        raise SourceError(f"{name} is {list(shape)}, and should have two dims{REMEDY}")
    return shape[0], shape[1]


def require_owners(
    checkpoint: Checkpoint, found: Mapping[str, Found], suffixes: tuple[str, ...], method: str
) -> None:
    """Check that each tensor with such a suffix belongs to a parameter that was found."""
    taken = {name for parameter in found.values() for name in parameter.tensors.values()}
    for name in checkpoint.tensors:
        if name.endswith(suffixes) and name not in taken:
            raise SourceError(f"{name} belongs to no weight that {method} has packed{REMEDY}")
