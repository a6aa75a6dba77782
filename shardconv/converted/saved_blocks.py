"""The factors of a block-scaled model, in the layout in which transformers saves its values.

A factor goes where its block of values goes. A layout that divides blocks is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardconv_runtime.errors import SourceError
from shardconv_runtime.format.slices import Range
from shardconv_runtime.tensors import lazy_tensor as lazy
from shardconv_runtime.tensors.lazy_tensor import FileLeaf, LazyTensor, Shape, StridedBox, contiguous_strides

from .saved import LazyWeights, saved_tensors


@dataclass(frozen=True, slots=True)
class Factors:
    """Of a parameter."""

    shape: Shape
    """Of the values."""
    block: Shape
    """Sizes of the blocks, one for each dim of the values."""
    tensor: LazyTensor
    """Global, one for each block."""


def saved_factors(model: Any, weights: LazyWeights, factors: Mapping[str, Factors]) -> dict[str, LazyTensor]:
    """The factors of the tensors that ``model.save_pretrained`` would write of values, by their names.

    Args:
        model: from ``saved.model_of``.
        weights: of the model; of parameters with factors, the values. Only dtypes and shapes count.
        factors: by FQN, a tied parameter under each of its names.

    Raises:
        SourceError: a block is divided.
    """
    positions = {name: _positions(name, tensor) for name, tensor in weights.items()}
    found = {}
    for name, tensor in saved_tensors(model, positions).items():
        owners = {_owner(piece) for piece in tensor.pieces}
        if owners & factors.keys():
            if not owners <= factors.keys():
                raise _divided(name)
            found[name] = _factors_of(name, tensor, factors)
    return found


def _positions(name: str, tensor: LazyTensor) -> LazyTensor:
    """A stand-in for a parameter, whose elements are known by their positions in it."""
    leaf = FileLeaf(Path(name), 0, tensor.dtype, math.prod(tensor.shape))
    return lazy.from_leaf(leaf, tensor.shape)


def _owner(piece: StridedBox) -> str:
    """The parameter that a piece is of; of a computed one, none that has a name."""
    return str(piece.leaf.path) if isinstance(piece.leaf, FileLeaf) else ""


def _divided(name: str) -> SourceError:
    return SourceError(
        f"{name} would be saved with parts of blocks, which share a factor; convert the model with --dtype, "
        "without blocks, and merge that"
    )


def _factors_of(name: str, saved: LazyTensor, factors: Mapping[str, Factors]) -> LazyTensor:
    dims = [_dims(name, piece, factors[_owner(piece)]) for piece in saved.pieces]
    block = _block(name, saved, dims, factors)
    shape = tuple(-(-extent // length) for extent, length in zip(saved.shape, block, strict=True))
    parts = [
        _part(name, saved, piece, mapped, block, factors[_owner(piece)])
        for piece, mapped in zip(saved.pieces, dims, strict=True)
    ]
    return lazy.assemble(parts[0][0].dtype, shape, parts)


def _dims(name: str, piece: StridedBox, of: Factors) -> list[int | None]:
    """Of which dim of the parameter a piece has positions, for each of its own; None where it has one."""
    strides = contiguous_strides(of.shape)
    by_stride = {stride: dim for dim, stride in enumerate(strides) if of.shape[dim] > 1}
    if any(n > 1 and s not in by_stride for n, s in zip(piece.shape, piece.strides, strict=True)):
        raise _divided(name)
    return [by_stride[s] if n > 1 else None for n, s in zip(piece.shape, piece.strides, strict=True)]


def _block(
    name: str, saved: LazyTensor, dims: list[list[int | None]], factors: Mapping[str, Factors]
) -> Shape:
    """Sizes of the blocks of a saved tensor: those of the parameter's dims, the same in all of it."""
    found: list[set[int]] = [set() for _ in saved.shape]
    for piece, mapped in zip(saved.pieces, dims, strict=True):
        for index, dim in enumerate(mapped):
            if dim is not None:
                found[index].add(factors[_owner(piece)].block[dim])
    if any(len(lengths) > 1 for lengths in found):
        raise _divided(name)
    return tuple(max(lengths, default=1) for lengths in found)


def _part(
    name: str, saved: LazyTensor, piece: StridedBox, dims: list[int | None], block: Shape, of: Factors
) -> tuple[LazyTensor, list[list[Range]]]:
    """The factors of a piece, and where they are among those of the saved tensor."""
    tensor, offset = of.tensor, piece.offset
    extents = {dim: n for dim, n in zip(dims, piece.shape, strict=True) if dim is not None}
    for dim, stride in enumerate(contiguous_strides(of.shape)):
        start, offset = divmod(offset, stride)
        span = _blocks(name, (start, start + extents.get(dim, 1)), of.shape[dim], of.block[dim])
        tensor = lazy.take(tensor, dim, (span,))
    held = [dim for dim in dims if dim is not None]
    single = [dim for dim in range(len(of.shape)) if dim not in held]
    tensor = lazy.permute(tensor, [*single, *held])
    for _ in single:
        tensor = lazy.squeeze(tensor, 0)
    for index in (index for index, dim in enumerate(dims) if dim is None):
        tensor = lazy.unsqueeze(tensor, index)
    starts = zip(piece.start, piece.shape, saved.shape, block, strict=True)
    return tensor, [[_blocks(name, (a, a + n), size, length)] for a, n, size, length in starts]


def _blocks(name: str, span: Range, size: int, length: int) -> Range:
    """The blocks of a stretch of a dim, which must begin and end between them."""
    start, stop = span
    if start % length or (stop % length and stop != size):
        raise _divided(name)
    return start // length, -(-stop // length)
