"""Tensors that interleave stretches of many files, assembled in memory band by band.

If ranks hold columns of a matrix, its rows alternate between short stretches of all their files. Copied
one by one, each would be a small write and a line of the journal. A band of full rows is read from each file
with one read, and written with one write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from ..format.slices import Range
from .lazy_tensor import ComputedLeaf, FileLeaf, LazyTensor, StridedBox, assemble, from_leaf, item_bytes, take

if TYPE_CHECKING:
    from torch import Tensor

BAND_BYTES = 1 << 22
"""Bytes of a band; constant, since journals count bands."""

SHORT_BYTES = 1 << 16
"""Stretches of at least this many bytes are written one by one."""

FEW = 64
"""Up to this many stretches are written one by one, however short."""


def is_interleaved(tensor: LazyTensor) -> bool:
    """Return whether a tensor consists of many short stretches."""
    item = item_bytes(tensor.dtype)
    num_runs = sum(math.prod(piece.shape) // _run(piece, tensor) for piece in tensor.pieces)
    return num_runs > FEW and math.prod(tensor.shape) * item < num_runs * SHORT_BYTES


def gathered(name: str, tensor: LazyTensor) -> LazyTensor:
    """Return the tensor as bands that are assembled in memory when they are needed.

    Args:
        name: the name of the tensor, for messages.
        tensor: returned unchanged if its elements are not stored in their order in files: each band of a
            transposed matrix would read the full matrix.
    """
    if not tensor.shape or tensor.is_cast or not all(map(_is_in_order, tensor.pieces)):
        return tensor
    bands = ((_band(name, tensor, box), [(span,) for span in box]) for box in _boxes(tensor))
    return assemble(tensor.dtype, tensor.shape, bands)


def _run(piece: StridedBox, tensor: LazyTensor) -> int:
    """Return the number of elements of a piece that are adjacent in the tensor."""
    run = 1
    for held, extent in zip(reversed(piece.shape), reversed(tensor.shape), strict=True):
        run *= held
        if held != extent:
            break
    return run


def _is_in_order(piece: StridedBox) -> bool:
    strides = [stride for stride, held in zip(piece.strides, piece.shape, strict=True) if held > 1]
    return isinstance(piece.leaf, FileLeaf) and strides == sorted(strides, reverse=True)


def _boxes(tensor: LazyTensor) -> Iterator[list[Range]]:
    """Yield contiguous boxes of the tensor of at most ``BAND_BYTES`` (or one element), in order."""
    shape, inner = tensor.shape, item_bytes(tensor.dtype)
    dim = len(shape) - 1
    while dim > 0 and inner * shape[dim] <= BAND_BYTES:
        inner *= shape[dim]
        dim -= 1
    step = max(1, BAND_BYTES // inner)
    below = [(0, extent) for extent in shape[dim + 1 :]]
    for outer in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            stop = min(start + step, shape[dim])
            yield [*((index, index + 1) for index in outer), (start, stop), *below]


def _band(name: str, tensor: LazyTensor, box: list[Range]) -> LazyTensor:
    for dim, span in enumerate(box):
        tensor = take(tensor, dim, (span,))
    leaf = ComputedLeaf(name, partial(_read, tensor), tensor.dtype, math.prod(tensor.shape))
    return from_leaf(leaf, tensor.shape)


def _read(tensor: LazyTensor) -> Tensor:
    from .copying import read_tensor  # imports numpy and torch, which checks of directories do without

    return read_tensor(tensor)
