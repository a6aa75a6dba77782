"""The stored tensors of packed parameters, in the layout in which transformers saves the plain model.

A stored tensor goes where its positions of the weight go. A layout that divides a step is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardconv_runtime.checkpoint.quantized import PackedWeight
from shardconv_runtime.errors import SourceError
from shardconv_runtime.format.packed_layout import tensor_name
from shardconv_runtime.format.slices import Range
from shardconv_runtime.tensors import lazy_tensor as lazy
from shardconv_runtime.tensors.copying import read_tensor
from shardconv_runtime.tensors.lazy_tensor import (
    ComputedLeaf,
    FileLeaf,
    LazyTensor,
    Shape,
    StridedBox,
    contiguous_strides,
)


def positions(name: str, dtype: str, shape: Shape) -> LazyTensor:
    """A stand-in for a packed weight, whose elements are known by their positions in it."""
    leaf = FileLeaf(Path(name), 0, dtype, math.prod(shape))
    return lazy.from_leaf(leaf, shape)


def with_packed(
    saved: Mapping[str, LazyTensor], weights: Mapping[str, PackedWeight]
) -> dict[str, LazyTensor]:
    """The tensors of a checkpoint, stored tensors in place of stand-ins.

    Args:
        saved: what ``saved.saved_tensors`` makes of the model with ``positions`` for its packed weights.
        weights: the packed weights, by the names of their stand-ins.

    Raises:
        SourceError: a step is divided.
    """
    found: dict[str, LazyTensor] = {}
    for name, tensor in saved.items():
        owners = {_owner(piece) for piece in tensor.pieces}
        if not owners & weights.keys():
            found[name] = tensor
        elif not owners <= weights.keys():
            raise _divided(name)
        else:
            found |= _stored(name, tensor, weights)
    return found


def _stored(name: str, saved: LazyTensor, weights: Mapping[str, PackedWeight]) -> dict[str, LazyTensor]:
    """The stored tensors of a saved weight."""
    of = weights[_owner(saved.pieces[0])]
    if (
        saved.shape == of.shape
        and saved.pieces == positions(_owner(saved.pieces[0]), saved.dtype, of.shape).pieces
    ):
        return {
            tensor_name(name, packed.name): _as_in_checkpoint(
                name, of.tensors[packed.name], packed.checkpoint_shape
            )
            for packed in of.packing.tensors
        }
    return {
        tensor_name(name, packed.name): _joined(name, saved, dict(_parts(name, packed.name, saved, weights)))
        for packed in of.packing.tensors
    }


def _as_in_checkpoint(name: str, tensor: LazyTensor, shape: Shape) -> LazyTensor:
    if not shape:
        return tensor
    reshaped = lazy.reshape(tensor, shape)
    if reshaped is None:  # columns of many ranks, of which flat memory has short runs
        made = ComputedLeaf(name, lambda: read_tensor(tensor), tensor.dtype, math.prod(shape))
        reshaped = lazy.from_leaf(made, shape)
    return reshaped


@dataclass(frozen=True, slots=True)
class _Part:
    """A stored tensor of a packed parameter that is divided or joined on saving."""

    shape: Shape
    """Of the weight."""
    block: Shape
    """The tensor's step in each dim of the weight."""
    tensor: LazyTensor


def _parts(
    name: str, part: str, saved: LazyTensor, weights: Mapping[str, PackedWeight]
) -> Iterator[tuple[str, _Part]]:
    """One stored tensor of each packed parameter of which a saved weight consists."""
    for owner in dict.fromkeys(map(_owner, saved.pieces)):
        weight = weights[owner]
        packed = next((t for t in weight.packing.tensors if t.name == part), None)
        if packed is None or [dim.of for dim in packed.dims] != list(range(len(weight.shape))):
            raise _divided(name)
        yield owner, _Part(weight.shape, tuple(dim.step for dim in packed.dims), weight.tensors[part])


def _owner(piece: StridedBox) -> str:
    """The parameter that a piece is of; of a computed one, none that has a name."""
    return str(piece.leaf.path) if isinstance(piece.leaf, FileLeaf) else ""


def _divided(name: str) -> SourceError:
    return SourceError(
        f"{name} would be saved with parts of its packed steps; convert the model with --dtype, "
        "dequantized, and merge that"
    )


def _joined(name: str, saved: LazyTensor, parts: Mapping[str, _Part]) -> LazyTensor:
    dims = [_dims(name, piece, parts[_owner(piece)]) for piece in saved.pieces]
    block = _block(name, saved, dims, parts)
    shape = tuple(-(-extent // length) for extent, length in zip(saved.shape, block, strict=True))
    placed = [
        _part(name, saved, piece, mapped, block, parts[_owner(piece)])
        for piece, mapped in zip(saved.pieces, dims, strict=True)
    ]
    return lazy.assemble(placed[0][0].dtype, shape, placed)


def _dims(name: str, piece: StridedBox, of: _Part) -> list[int | None]:
    """Of which dim of the parameter a piece has positions, for each of its own; None where it has one."""
    strides = contiguous_strides(of.shape)
    by_stride = {stride: dim for dim, stride in enumerate(strides) if of.shape[dim] > 1}
    if any(n > 1 and s not in by_stride for n, s in zip(piece.shape, piece.strides, strict=True)):
        raise _divided(name)
    return [by_stride[s] if n > 1 else None for n, s in zip(piece.shape, piece.strides, strict=True)]


def _block(name: str, saved: LazyTensor, dims: list[list[int | None]], parts: Mapping[str, _Part]) -> Shape:
    """Sizes of the blocks of a saved tensor: those of the parameter's dims, the same in all of it."""
    found: list[set[int]] = [set() for _ in saved.shape]
    for piece, mapped in zip(saved.pieces, dims, strict=True):
        for index, dim in enumerate(mapped):
            if dim is not None:
                found[index].add(parts[_owner(piece)].block[dim])
    if any(len(lengths) > 1 for lengths in found):
        raise _divided(name)
    return tuple(max(lengths, default=1) for lengths in found)


def _part(
    name: str, saved: LazyTensor, piece: StridedBox, dims: list[int | None], block: Shape, of: _Part
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
