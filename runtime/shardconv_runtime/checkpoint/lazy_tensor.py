"""Tensors that are not read yet: expressions over the bytes of files.

A ``LazyTensor`` is a set of boxes that cover it, each a strided window of a **leaf**: the bytes of a
tensor in a file, zeros, or the result of a computation. Slicing, concatenating, stacking, transposing and
most reshapes return another lazy tensor without reading a byte. A rank's slice of a parameter, a parameter
assembled from ranks' slices, and a slice of that for another number of ranks are values of this one type.
``copying`` reads and writes them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from ..format.header import TORCH_NAME, StoredTensor, item_bytes
from ..format.slices import Range
from ..storage.file_access import WeightFile

if TYPE_CHECKING:
    from torch import Tensor


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileLeaf:
    """Contiguous elements in a file."""

    path: WeightFile
    offset: int
    """The offset of the first element, in bytes."""
    dtype: str
    """torch's name."""
    num_elements: int


@dataclass(frozen=True, slots=True)
class ZeroLeaf:
    """Zeros."""

    dtype: str
    num_elements: int


@dataclass(frozen=True, slots=True, eq=False)
class ComputedLeaf:
    """The elements, row-major, of a tensor that is computed when it is needed."""

    name: str
    """The name in messages."""
    compute: Callable[[], Tensor] = field(repr=False)
    """Returns the tensor on the CPU, of ``dtype`` and with ``num_elements``; called at each use."""
    dtype: str
    num_elements: int


LazyLeaf = FileLeaf | ZeroLeaf | ComputedLeaf


@dataclass(frozen=True, slots=True)
class StridedBox:
    """A box of a tensor, and the strided window of a leaf that holds its elements."""

    start: Shape
    """The start of the box, in the tensor."""
    shape: Shape
    leaf: LazyLeaf
    offset: int
    """The offset of the box's first element, in elements of the leaf."""
    strides: Shape
    """The strides in elements of the leaf."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of boxes. Elements of leaves of another dtype are cast to ``dtype``."""

    dtype: str
    shape: Shape
    pieces: tuple[StridedBox, ...]
    """Boxes that cover each position once; none for a tensor without elements."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    @property
    def is_cast(self) -> bool:
        """Return whether the elements of some leaf are cast."""
        return any(piece.leaf.dtype != self.dtype for piece in self.pieces)


def stored(path: WeightFile, start: int, tensor: StoredTensor) -> LazyTensor:
    """Return a tensor of a safetensors file.

    Args:
        tensor: its entry in the header, of a dtype that torch has.
    """
    leaf = FileLeaf(path, start + tensor.offsets[0], TORCH_NAME[tensor.dtype], math.prod(tensor.shape))
    return from_leaf(leaf, tensor.shape)


def from_leaf(leaf: LazyLeaf, shape: Sequence[int]) -> LazyTensor:
    """Return a tensor of all elements of a leaf, row-major."""
    shape = tuple(shape)
    assert math.prod(shape) == leaf.num_elements
    if leaf.num_elements == 0:
        return LazyTensor(leaf.dtype, shape, ())
    piece = StridedBox((0,) * len(shape), shape, leaf, 0, contiguous_strides(shape))
    return LazyTensor(leaf.dtype, shape, (piece,))


def zeros(dtype: str, shape: Sequence[int]) -> LazyTensor:
    """Return a tensor of zeros."""
    return from_leaf(ZeroLeaf(dtype, math.prod(shape)), shape)


def cast(tensor: LazyTensor, dtype: str) -> LazyTensor | None:
    """Return the tensor cast to ``dtype``; None if its elements would be cast twice."""
    if dtype == tensor.dtype:
        return tensor
    return None if tensor.is_cast else replace(tensor, dtype=dtype)


def take(tensor: LazyTensor, dim: int, spans: Sequence[Range]) -> LazyTensor:
    """Return the positions of a dim that lie in ascending ``spans``, laid end to end."""
    size = tensor.shape[dim]
    if tuple(spans) == ((0, size),):
        return tensor
    lengths = [stop - start for start, stop in spans]
    starts = list(accumulate(lengths, initial=0))
    shape = _with(tensor.shape, dim, sum(lengths))
    ends = [stop for _, stop in spans]
    pieces: list[StridedBox] = []
    for piece in tensor.pieces:
        low, high = piece.start[dim], piece.start[dim] + piece.shape[dim]
        for index in range(bisect_right(ends, low), len(spans)):
            start, stop = max(low, spans[index][0]), min(high, spans[index][1])
            if spans[index][0] >= high:
                break
            if start < stop:
                pieces.append(_clipped(piece, dim, start, stop, starts[index] + start - spans[index][0]))
    return LazyTensor(tensor.dtype, shape, tuple(pieces))


def permute(tensor: LazyTensor, order: Sequence[int]) -> LazyTensor:
    """Return the dims in another order."""

    def reorder(values: Shape) -> Shape:
        return tuple(values[dim] for dim in order)

    pieces = tuple(
        replace(p, start=reorder(p.start), shape=reorder(p.shape), strides=reorder(p.strides))
        for p in tensor.pieces
    )
    return LazyTensor(tensor.dtype, reorder(tensor.shape), pieces)


def concatenate(tensors: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Return tensors of one dtype laid end to end along a dim."""
    first = tensors[0]
    if len({_with(tensor.shape, dim, 0) for tensor in tensors}) > 1:
        shapes = sorted({tensor.shape for tensor in tensors})
        raise ValueError(f"shapes {shapes} cannot be joined along dim {dim}")
    pieces: list[StridedBox] = []
    offset = 0
    for tensor in tensors:
        assert tensor.dtype == first.dtype
        pieces += [_moved(piece, dim, offset) for piece in tensor.pieces]
        offset += tensor.shape[dim]
    return LazyTensor(first.dtype, _with(first.shape, dim, offset), tuple(pieces))


def unsqueeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    """Return a new dim of size 1."""

    def insert(values: Shape, value: int) -> Shape:
        return (*values[:dim], value, *values[dim:])

    pieces = tuple(
        replace(p, start=insert(p.start, 0), shape=insert(p.shape, 1), strides=insert(p.strides, 0))
        for p in tensor.pieces
    )
    return LazyTensor(tensor.dtype, insert(tensor.shape, 1), pieces)


def squeeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    """Remove a dim of size 1."""
    assert tensor.shape[dim] == 1

    def remove(values: Shape) -> Shape:
        return values[:dim] + values[dim + 1 :]

    pieces = tuple(
        replace(p, start=remove(p.start), shape=remove(p.shape), strides=remove(p.strides))
        for p in tensor.pieces
    )
    return LazyTensor(tensor.dtype, remove(tensor.shape), pieces)


def reshape(tensor: LazyTensor, shape: Sequence[int]) -> LazyTensor | None:
    """Return the elements in row-major order in another shape; None if a box would not stay a box."""
    shape = tuple(shape)
    assert math.prod(shape) == math.prod(tensor.shape)
    if not tensor.pieces:
        return LazyTensor(tensor.dtype, shape, ())
    groups = _reshape_groups(tensor.shape, shape)
    pieces = [_reshape_piece(piece, tensor.shape, shape, groups) for piece in tensor.pieces]
    if any(piece is None for piece in pieces):
        return None
    return LazyTensor(tensor.dtype, shape, tuple(piece for piece in pieces if piece is not None))


def assemble(
    dtype: str, shape: Sequence[int], parts: Iterable[tuple[LazyTensor, Sequence[Sequence[Range]]]]
) -> LazyTensor:
    """Return a tensor from parts of it.

    Args:
        dtype: the dtype of the tensor and its parts.
    """
    pieces: list[StridedBox] = []
    for part, positions in parts:
        boxes = list(part.pieces)
        for dim, spans in enumerate(positions):
            boxes = [moved for box in boxes for moved in _spread(box, dim, spans)]
        pieces += boxes
    assert sum(math.prod(piece.shape) for piece in pieces) == math.prod(shape), "covered once"
    return LazyTensor(dtype, tuple(shape), tuple(pieces))


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Return row-major strides, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])


def _moved(piece: StridedBox, dim: int, distance: int) -> StridedBox:
    return replace(piece, start=_with(piece.start, dim, piece.start[dim] + distance)) if distance else piece


def _clipped(piece: StridedBox, dim: int, start: int, stop: int, new_start: int) -> StridedBox:
    """Return the part of a piece from ``start`` to ``stop`` of a dim, moved to ``new_start``."""
    offset = piece.offset + (start - piece.start[dim]) * piece.strides[dim]
    return replace(
        piece,
        start=_with(piece.start, dim, new_start),
        shape=_with(piece.shape, dim, stop - start),
        offset=offset,
    )


def _spread(piece: StridedBox, dim: int, spans: Sequence[Range]) -> Iterable[StridedBox]:
    """Move the positions of a dim to ``spans``, in order."""
    done = 0
    low, high = piece.start[dim], piece.start[dim] + piece.shape[dim]
    for begin, end in spans:
        start, stop = max(low, done), min(high, done + end - begin)
        if start < stop:
            yield _clipped(piece, dim, start, stop, begin + start - done)
        done += end - begin


_Group = tuple[Range, Range]
"""Dims of the old shape and dims of the new shape, with equal products."""


def _reshape_groups(old: Shape, new: Shape) -> list[_Group]:
    """Return the smallest runs of dims with equal products, in order."""
    groups: list[_Group] = []
    i = j = 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        a = b = 1
        if i < len(old):
            a, i = old[i], i + 1
        if j < len(new):
            b, j = new[j], j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        groups.append(((start_i, i), (start_j, j)))
    return groups


def _reshape_piece(piece: StridedBox, old: Shape, new: Shape, groups: Sequence[_Group]) -> StridedBox | None:
    start: list[int] = []
    shape: list[int] = []
    strides: list[int] = []
    for (a, b), (c, d) in groups:
        if b - a == 1 and d - c == 1:
            start, shape, strides = (
                [*start, piece.start[a]],
                [*shape, piece.shape[a]],
                [*strides, piece.strides[a]],
            )
            continue
        box = _regroup(piece, (a, b), old, new[c:d])
        if box is None:
            return None
        start, shape, strides = [*start, *box[0]], [*shape, *box[1]], [*strides, *box[2]]
    return replace(piece, start=tuple(start), shape=tuple(shape), strides=tuple(strides))


def _regroup(
    piece: StridedBox, dims: Range, old: Shape, new: Shape
) -> tuple[Sequence[int], Sequence[int], Sequence[int]] | None:
    """Start, shape and strides of a piece in dims of the sizes ``new``, which replace ``dims``.

    Its elements must be evenly strided over ``dims`` in row-major order and form a box of ``new``; otherwise
    the result is None.
    """
    long_dims = [dim for dim in range(*dims) if old[dim] > 1]
    if not long_dims:
        return [0] * len(new), [1] * len(new), [0] * len(new)
    outer, inner = long_dims[0], long_dims[1:]
    if any(piece.shape[dim] != old[dim] for dim in inner):
        return None
    step = piece.strides[long_dims[-1]]
    extent = 1
    for dim in reversed(long_dims):
        if piece.strides[dim] != step * extent and piece.shape[dim] > 1:
            return None
        extent *= old[dim]
    below = math.prod(old[dim] for dim in inner)
    return _box(piece.start[outer] * below, piece.shape[outer] * below, new, step)


def _box(
    first: int, count: int, shape: Shape, step: int
) -> tuple[Sequence[int], Sequence[int], Sequence[int]] | None:
    """Return ``count`` flat positions from ``first`` as a box of a row-major ``shape``, if they are one."""
    strides = contiguous_strides(shape)
    start, sizes = [0] * len(shape), [1] * len(shape)
    for dim, stride in enumerate(strides):
        start[dim], first = divmod(first, stride)
        if count >= stride:
            sizes[dim], rest = divmod(count, stride)
            if rest or first or start[dim] + sizes[dim] > shape[dim]:
                return None
            sizes[dim + 1 :] = shape[dim + 1 :]
            return start, sizes, [stride * step for stride in strides]
    return None
