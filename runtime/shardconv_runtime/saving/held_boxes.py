"""The part of a global tensor that a process holds, as boxes.

A rank's positions of a dim are ranges, so that a local tensor is a grid of boxes. A data-parallel process may
hold only a **window** of its rank's tensor. Where several ranks hold the same positions, the lowest of them
**owns** them: the owned boxes of all ranks tile the tensor.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..errors import PlanError
from ..format.dims import Dim
from ..format.plan import ParameterPlan
from ..format.slices import Mesh, Range, local_size, ranges
from ..format.stored_layout import holds_values

# The window of its rank's tensor that a process holds: a chunk where data-parallel processes share it.


def chunk(span: Range, parts: int, part: int) -> Range:
    """A part of consecutive positions, as ``Shard`` and ``torch.chunk`` have it: the last may be empty."""
    start, stop = span
    length = -(-(stop - start) // parts)
    begin = min(start + part * length, stop)
    return begin, min(begin + length, stop)


def local_window(name: str, parameter: Tensor) -> tuple[tuple[Range, ...], bool]:
    """The window of its rank's tensor that a process holds.

    Args:
        name: FQN, for messages.
        parameter: local, or a DTensor over data-parallel processes whose global shape is the rank's local
            shape.

    Returns:
        The window, one range of local positions for each dim, and whether this process is the first of those
        that hold it.

    Raises:
        PlanError: the DTensor is neither sharded evenly nor replicated.
    """
    spans = [(0, size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return tuple(spans), True
    coordinates = parameter.device_mesh.get_coordinate()
    assert coordinates is not None, "this process is in its mesh"
    first = True
    for placement, parts, part in zip(
        parameter.placements, parameter.device_mesh.shape, coordinates, strict=True
    ):
        if type(placement) is Shard:
            spans[placement.dim] = chunk(spans[placement.dim], parts, part)
        elif isinstance(placement, Replicate):
            first = first and part == 0
        else:
            raise PlanError(
                f"{name} is a DTensor placed as {placement}; only Shard and Replicate can be stored"
            )
    local = tuple(local_tensor(parameter).shape)
    if local != tuple(stop - start for start, stop in spans):
        raise PlanError(f"{name} is a DTensor whose local shape {local} is not an even chunk of it")
    return tuple(spans), first


def local_tensor(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be a DTensor over data-parallel processes.

    Args:
        tensor: any shape and dtype; returned unchanged if it is not a DTensor.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


LocalWindow = Sequence[Range]
"""Half-open local positions, one range for each dim."""


class Box(NamedTuple):
    """A box of a global tensor, and its position in a window of the local one."""

    offsets: tuple[int, ...]
    """Global."""
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    """In the window."""


def full_window(entry: ParameterPlan, mesh: Mesh, rank: int) -> tuple[Range, ...]:
    """The window that covers a rank's tensor."""
    return tuple((0, local_size(dim, mesh, rank)) for dim in entry.dims)


def held_boxes(entry: ParameterPlan, mesh: Mesh, rank: int, window: LocalWindow) -> list[Box]:
    """The boxes that fill a window of a rank's tensor; none of a Partial tensor where it is zero.

    Args:
        entry: the parameter's plan.
        mesh: of the plan.
        rank: whose tensor it is.
        window: local positions.
    """
    if not holds_values(entry, mesh, rank):
        return []
    pieces = [_pieces(ranges(dim, mesh, rank), *part) for dim, part in zip(entry.dims, window, strict=True)]
    return [_box(chosen) for chosen in product(*pieces)]


def owned_boxes(entry: ParameterPlan, mesh: Mesh, rank: int, window: LocalWindow) -> list[Box]:
    """The parts of ``held_boxes`` that no lower rank holds; arguments as there.

    Boxes of two ranks may overlap without being equal (segments of a dim that are sharded over different
    axes), so they are divided wherever a box of some rank begins or ends.
    """
    if not holds_values(entry, mesh, rank):
        return []
    values = _mask(r for r in range(math.prod(mesh)) if holds_values(entry, mesh, r))
    pieces = []
    for dim, part in zip(entry.dims, window, strict=True):
        bounds, holders = _cells(dim, mesh)
        pieces.append(
            [
                (piece, holders[bisect_left(bounds, piece.start + 1) - 1])
                for held in _pieces(ranges(dim, mesh, rank), *part)
                for piece in _divided(held, bounds)
            ]
        )
    found = []
    for chosen in product(*pieces):
        holding = values
        for _, mask in chosen:
            holding &= mask
        if holding & -holding == 1 << rank:
            found.append(_box([piece for piece, _ in chosen]))
    return found


class _Piece(NamedTuple):
    start: int
    """Global."""
    size: int
    local_start: int
    """In the window."""


def _pieces(held: Iterable[Range], first: int, last: int) -> list[_Piece]:
    """The ranges of local positions from ``first`` up to ``last``."""
    pieces, local = [], 0
    for start, stop in held:
        begin, end = max(local, first), min(local + stop - start, last)
        if begin < end:
            pieces.append(_Piece(start + begin - local, end - begin, begin - first))
        local += stop - start
    return pieces


def _divided(piece: _Piece, bounds: Sequence[int]) -> list[_Piece]:
    """The parts of a piece between the bounds inside of it."""
    inside = bounds[bisect_left(bounds, piece.start + 1) : bisect_left(bounds, piece.start + piece.size)]
    ends = [piece.start, *inside, piece.start + piece.size]
    return [
        _Piece(start, stop - start, piece.local_start + start - piece.start) for start, stop in pairwise(ends)
    ]


@lru_cache(maxsize=256)
def _cells(dim: Dim, mesh: Mesh) -> tuple[list[int], list[int]]:
    """The positions where some rank's range of a dim begins or ends, and for each the ranks that hold the
    positions up to the next one, as bits."""
    held = [ranges(dim, mesh, rank) for rank in range(math.prod(mesh))]
    bounds = sorted({end for spans in held for span in spans for end in span})
    holders = [0] * len(bounds)
    for rank, spans in enumerate(held):
        for start, stop in spans:
            for cell in range(bisect_left(bounds, start), bisect_left(bounds, stop)):
                holders[cell] |= 1 << rank
    return bounds, holders


def _mask(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in ranks)


def _box(pieces: Sequence[_Piece]) -> Box:
    return Box(
        tuple(piece.start for piece in pieces),
        tuple(piece.size for piece in pieces),
        tuple(piece.local_start for piece in pieces),
    )
