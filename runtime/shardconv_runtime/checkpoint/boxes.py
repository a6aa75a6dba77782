"""Boxes of elements: their strides in a leaf, from which they are read, and in a file, to which they go."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..format.header import item_bytes
from .lazy_tensor import LazyTensor, StridedBox, contiguous_strides


class BoxDim(NamedTuple):
    """One dim of a box."""

    size: int
    source: int
    """Stride in elements of the leaf."""
    target: int
    """Stride in elements of the written tensor."""


@dataclass(frozen=True, slots=True)
class Move:
    """A box of elements: its position in a leaf and its position in a file."""

    file: int
    """Index of the target file."""
    offset: int
    """The offset of the first element in that file, in bytes."""
    source: int
    """The position of the first element in the leaf, in elements."""
    dims: tuple[BoxDim, ...]
    """Dims by descending source stride; dims that are contiguous on both sides are merged."""
    dtype: str
    """The dtype of the written elements."""

    @property
    def end(self) -> int:
        """Return the position after its last element in the leaf."""
        return self.source + extent(self.dims)

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the box."""
        return math.prod(dim.size for dim in self.dims)


def move_of(tensor: LazyTensor, piece: StridedBox, file: int, offset: int) -> Move:
    """Return the move of one box of a tensor.

    Args:
        offset: the offset of the tensor in that file, in bytes.
    """
    strides = contiguous_strides(tensor.shape)
    first = sum(a * b for a, b in zip(piece.start, strides, strict=True)) * item_bytes(tensor.dtype)
    dims = [BoxDim(*dim) for dim in zip(piece.shape, piece.strides, strides, strict=True) if dim[0] > 1]
    ordered = coalesce(sorted(dims, key=lambda dim: -dim.source))
    return Move(file, offset + first, piece.offset, ordered, tensor.dtype)


def coalesce(dims: Sequence[BoxDim]) -> tuple[BoxDim, ...]:
    """Merge dims that are contiguous on both sides."""
    merged: list[BoxDim] = []
    for dim in dims:
        if merged:
            outer = merged[-1]
            if outer.source == dim.size * dim.source and outer.target == dim.size * dim.target:
                merged[-1] = BoxDim(outer.size * dim.size, dim.source, dim.target)
                continue
        merged.append(dim)
    return tuple(merged)


def extent(dims: Sequence[BoxDim]) -> int:
    """Return the distance in the leaf from the first element to one past the last."""
    return 1 + sum((dim.size - 1) * dim.source for dim in dims)


def is_run(dims: Sequence[BoxDim]) -> bool:
    """Return whether a box is contiguous on both sides."""
    return not dims or (len(dims) == 1 and dims[0].source == 1 and dims[0].target == 1)


def target_runs(dims: Sequence[BoxDim]) -> tuple[int, list[int]]:
    """Return the contiguous runs of a box in the target.

    Returns:
        The length of each run and their starts relative to the first, in elements.
    """
    return _runs([(dim.size, dim.target) for dim in dims])


def source_runs(dims: Sequence[BoxDim]) -> tuple[int, list[int]]:
    """Return the contiguous runs of a box in the leaf.

    Returns:
        The length of each run and their starts relative to the first, in elements.
    """
    return _runs([(dim.size, dim.source) for dim in dims])


def source_stretches(dims: Sequence[BoxDim]) -> tuple[int, int, int]:
    """Return the contiguous runs of a box in the leaf, counted.

    Returns:
        The length of each run in elements, the number of runs, and the distance between their starts.
    """
    run, inner = _inner([(dim.size, dim.source) for dim in dims])
    return run, math.prod(dim.size for dim in dims[:inner]), dims[inner - 1].source if inner else run


def wanted(boxes: Sequence[Move], gap: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches of a leaf that hold all elements of the boxes.

    Yields:
        ``(start, stop)`` in elements, ascending.
    """
    runs: list[tuple[int, int]] = []
    for box in boxes:
        run, starts = source_runs(box.dims)
        runs += ((box.source + start, box.source + start + run) for start in starts)
    runs.sort()
    start, stop = runs[0]
    for low, high in runs[1:]:
        if low - stop > gap:
            yield start, stop
            start = low
        stop = max(stop, high)
    yield start, stop


def packed_source(move: Move) -> Move:
    """Return the move from a buffer that holds only the elements of the box, in the order of the leaf."""
    dims, below = [], 1
    for dim in reversed(move.dims):
        dims.append(dim._replace(source=below))
        below *= dim.size
    return replace(move, source=0, dims=coalesce(dims[::-1]))


def _runs(dims: Sequence[tuple[int, int]]) -> tuple[int, list[int]]:
    run, inner = _inner(dims)
    starts = [0]
    for size, stride in dims[:inner]:
        starts = [start + index * stride for start in starts for index in range(size)]
    return run, starts


def _inner(dims: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the length of the contiguous run of the inner dims, and the number of dims outside of it."""
    run, inner = 1, len(dims)
    while inner and dims[inner - 1][1] == run:
        inner -= 1
        run *= dims[inner][0]
    return run, inner


def within(move: Move, low: int, high: int) -> Iterator[Move]:
    """Yield the parts of a move whose elements lie in ``[low, high)`` of the leaf, as boxes."""
    if move.source >= high or move.end <= low:
        return
    if low <= move.source and move.end <= high:
        yield move
        return
    outer, inner = move.dims[0], move.dims[1:]
    length = extent(inner)
    first = max(0, -((move.source - low) // outer.source))
    last = min(outer.size - 1, (high - length - move.source) // outer.source)
    if first <= last:
        yield _part(move, first, (outer._replace(size=last - first + 1), *inner))
    if length == 1:
        return
    straddling = {first - 1, last + 1} if first <= last else set(_touching(move, low, high, length))
    for index in sorted(straddling):
        if 0 <= index < outer.size:
            yield from within(_part(move, index, inner), low, high)


def _touching(move: Move, low: int, high: int, length: int) -> range:
    """Return indices of the outer dim with some, but not all, elements in ``[low, high)``."""
    stride = move.dims[0].source
    first = -((length - 1 + move.source - low) // stride)
    return range(max(0, first), min(move.dims[0].size, (high - 1 - move.source) // stride + 1))


def _part(move: Move, index: int, dims: tuple[BoxDim, ...]) -> Move:
    """Return the part of a move that starts at ``index`` of the outer dim."""
    outer = move.dims[0]
    return Move(
        move.file,
        move.offset + index * outer.target * item_bytes(move.dtype),
        move.source + index * outer.source,
        coalesce([dim for dim in dims if dim.size > 1]),
        move.dtype,
    )


def scatters(move: Move) -> bool:
    """Return whether adjacent elements of the leaf are apart in the target, as in a transpose."""
    return bool(move.dims) and move.dims[-1].target != 1
