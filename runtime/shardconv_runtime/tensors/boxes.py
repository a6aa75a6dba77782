"""Boxes on the way from a leaf to a file: where their elements are, and where they go."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .lazy_tensor import LazyTensor, StridedBox, contiguous_strides, item_bytes


class BoxDim(NamedTuple):
    """One dim of a box."""

    size: int
    source: int
    """Stride in elements of the leaf."""
    target: int
    """Stride in elements of the written tensor."""


@dataclass(frozen=True, slots=True)
class Move:
    """A box: where its elements are in a leaf, and where they go in a file."""

    file: int
    """Index of the target file."""
    offset: int
    """Byte in that file of the first element."""
    source: int
    """Element of the leaf that is the first."""
    dims: tuple[BoxDim, ...]
    """By descending source stride; those that are contiguous on both sides are one."""
    dtype: str
    """Of the written elements."""

    @property
    def end(self) -> int:
        """Past the last element of the leaf."""
        return self.source + extent(self.dims)

    @property
    def num_elements(self) -> int:
        """That are moved."""
        return math.prod(dim.size for dim in self.dims)


def move_of(tensor: LazyTensor, piece: StridedBox, file: int, offset: int) -> Move:
    """The box of a tensor that begins at byte ``offset`` of a file."""
    strides = contiguous_strides(tensor.shape)
    first = sum(a * b for a, b in zip(piece.start, strides, strict=True)) * item_bytes(tensor.dtype)
    dims = [BoxDim(*dim) for dim in zip(piece.shape, piece.strides, strides, strict=True) if dim[0] > 1]
    ordered = coalesce(sorted(dims, key=lambda dim: -dim.source))
    return Move(file, offset + first, piece.offset, ordered, tensor.dtype)


def coalesce(dims: Sequence[BoxDim]) -> tuple[BoxDim, ...]:
    """The dims, those made one that are contiguous on both sides."""
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
    """From the first element to past the last, in the leaf."""
    return 1 + sum((dim.size - 1) * dim.source for dim in dims)


def is_run(dims: Sequence[BoxDim]) -> bool:
    """Contiguous on both sides."""
    return not dims or (len(dims) == 1 and dims[0].source == 1 and dims[0].target == 1)


def target_runs(dims: Sequence[BoxDim]) -> tuple[int, list[int]]:
    """Elements of each contiguous stretch of the target, and where they begin, relative to the first.

    Args:
        dims: by descending target stride.
    """
    return _runs([(dim.size, dim.target) for dim in dims])


def source_runs(dims: Sequence[BoxDim]) -> tuple[int, list[int]]:
    """Elements of each contiguous stretch of the leaf, and where they begin, relative to the first.

    Args:
        dims: by descending source stride.
    """
    return _runs([(dim.size, dim.source) for dim in dims])


def source_stretches(dims: Sequence[BoxDim]) -> tuple[int, int, int]:
    """Elements of each contiguous stretch of the leaf, how many there are, and from one to the next.

    Args:
        dims: by descending source stride.
    """
    run, inner = _inner([(dim.size, dim.source) for dim in dims])
    return run, math.prod(dim.size for dim in dims[:inner]), dims[inner - 1].source if inner else run


def wanted(boxes: Sequence[Move], gap: int) -> Iterator[tuple[int, int]]:
    """The stretches of a leaf that hold all elements of the boxes, ascending, ``(start, stop)``.

    Args:
        boxes: of one leaf.
        gap: elements between two stretches, at most, for which they are one.
    """
    found: list[tuple[int, int]] = []
    for box in boxes:
        run, starts = source_runs(box.dims)
        found += ((box.source + start, box.source + start + run) for start in starts)
    found.sort()
    start, stop = found[0]
    for low, high in found[1:]:
        if low - stop > gap:
            yield start, stop
            start = low
        stop = max(stop, high)
    yield start, stop


def packed_source(move: Move) -> Move:
    """The box in a buffer that holds its elements only, in the order of the leaf."""
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
    """Elements of the contiguous stretch of the inner dims, and how many dims are outside of it."""
    run, inner = 1, len(dims)
    while inner and dims[inner - 1][1] == run:
        inner -= 1
        run *= dims[inner][0]
    return run, inner


def within(move: Move, low: int, high: int) -> Iterator[Move]:
    """The boxes of a move whose elements lie in ``[low, high)`` of the leaf."""
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
    """Indices of the outer dim with elements in ``[low, high)``, none of which lies in it as a whole."""
    stride = move.dims[0].source
    first = -((length - 1 + move.source - low) // stride)
    return range(max(0, first), min(move.dims[0].size, (high - 1 - move.source) // stride + 1))


def _part(move: Move, index: int, dims: tuple[BoxDim, ...]) -> Move:
    """From ``index`` of the outer dim on."""
    outer = move.dims[0]
    return Move(
        move.file,
        move.offset + index * outer.target * item_bytes(move.dtype),
        move.source + index * outer.source,
        coalesce([dim for dim in dims if dim.size > 1]),
        move.dtype,
    )


def scatters(move: Move) -> bool:
    """Whether elements that are neighbors in the leaf are not in the target (a transpose)."""
    return bool(move.dims) and move.dims[-1].target != 1
