"""Quantized checkpoints: block-scaled float8 is converted, other methods are refused.

A block-scaled checkpoint holds float8 values under the name of a weight, and under NAME_scale_inv one
factor for each block of, usually, 128 by 128 of them. The unquantized model is planned; conversions that
only move elements move the factors like the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import SourceError
from ..format.block_scales import VALUES_DTYPE, dequantized
from ..format.stored_layout import SUFFIX
from ..tensors.copying import read_tensor
from ..tensors.lazy_tensor import ComputedLeaf, LazyLeaf, LazyTensor, StridedBox, from_leaf

BlockShape = tuple[int, int]
"""Rows and columns of a block of a matrix."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """A parameter as values and factors."""

    values: LazyTensor
    factors: LazyTensor
    block: tuple[int, ...]
    """Sizes of the blocks, one for each dim of the values."""


def block_shape_of(config: Any, where: str) -> BlockShape | None:
    """Sizes of the blocks of a block-scaled checkpoint; None for an unquantized one.

    Args:
        config: of the checkpoint.
        where: the checkpoint, for messages.

    Raises:
        SourceError: the checkpoint is quantized with another method.
    """
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        settings = getattr(part, "quantization_config", None)
        if settings:
            found = settings if isinstance(settings, dict) else vars(settings)
            return _blocks(found, where)
    return None


def without_quantization(config: Any) -> Any:
    """A copy of a config that builds the unquantized model."""
    plain = type(config).from_dict(config.to_dict())
    for part in (plain, *(getattr(plain, name, None) for name in getattr(plain, "sub_configs", ()))):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return plain


def factors_in(tensors: Mapping[str, LazyTensor], blocks: BlockShape) -> dict[str, LazyTensor]:
    """The factors of a checkpoint by the names of their values.

    Raises:
        SourceError: factors lack their float8 values or the reverse, or their number is not that of blocks.
    """
    found = {}
    for name, tensor in tensors.items():
        values = tensors.get(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
        if values is not None:
            _require_pair(name, values, tensor, blocks)
            found[name.removesuffix(SUFFIX)] = tensor
    for name, tensor in tensors.items():
        if tensor.dtype == VALUES_DTYPE and name not in found:
            raise SourceError(f"{name} is in float8 and lacks {name}{SUFFIX}; download the checkpoint again")
    return found


def dequantized_tensors(
    tensors: Mapping[str, LazyTensor], factors: Mapping[str, LazyTensor], blocks: BlockShape, dtype: str
) -> dict[str, LazyTensor]:
    """The checkpoint with values times factors, computed when they are written."""
    plain = {name: tensor for name, tensor in tensors.items() if name.removesuffix(SUFFIX) not in factors}
    for name, scale in factors.items():
        values = tensors[name]

        def compute(values: LazyTensor = values, scale: LazyTensor = scale) -> torch.Tensor:
            return dequantized(read_tensor(values), read_tensor(scale), blocks, getattr(torch, dtype))

        count = torch.Size(values.shape).numel()
        plain[name] = from_leaf(ComputedLeaf(f"{name}, dequantized", compute, dtype, count), values.shape)
    return plain


class Scales:
    """From parameters of float8 values to their factors."""

    def __init__(
        self, tensors: Mapping[str, LazyTensor], factors: Mapping[str, LazyTensor], blocks: BlockShape
    ) -> None:
        self._blocks = blocks
        self._by_leaf: dict[LazyLeaf, tuple[LazyTensor, LazyTensor]] = {
            tensors[name].pieces[0].leaf: (tensors[name], scale) for name, scale in factors.items()
        }

    def of(self, name: str, weight: LazyTensor) -> Scaled | None:
        """The values and factors of a parameter; None if it has no float8 values.

        Raises:
            SourceError: the parameter is assembled from partial blocks.
        """
        scaled = [piece.leaf in self._by_leaf for piece in weight.pieces]
        if not any(scaled):
            return None
        if not all(scaled):
            raise SourceError(f"{name} is assembled from weights with and without factors; pass --dtype")
        block = self._block(name, weight)
        pieces = tuple(self._factors(name, weight, piece, block) for piece in weight.pieces)
        shape = tuple(-(-extent // length) for extent, length in zip(weight.shape, block, strict=True))
        return Scaled(
            replace(weight, dtype=VALUES_DTYPE), LazyTensor(pieces[0].leaf.dtype, shape, pieces), block
        )

    def _block(self, name: str, weight: LazyTensor) -> tuple[int, ...]:
        """The block's size in each dim; rows and columns of the stored matrices may be any two of them."""
        block = [1] * len(weight.shape)
        for piece in weight.pieces:
            columns = self._by_leaf[piece.leaf][0].shape[1]
            for dim, (extent, stride) in enumerate(zip(piece.shape, piece.strides, strict=True)):
                length = self._blocks[0 if stride == columns else 1]
                if extent > 1 and (stride not in (1, columns) or block[dim] not in (1, length)):
                    raise SourceError(f"{name} is reordered on loading, and its blocks with it; pass --dtype")
                if extent > 1:
                    block[dim] = length
        return tuple(block)

    def _factors(
        self, name: str, weight: LazyTensor, piece: StridedBox, block: tuple[int, ...]
    ) -> StridedBox:
        values, scale = self._by_leaf[piece.leaf]
        rows, columns = values.shape
        row, column = divmod(piece.offset, columns)
        num_rows = next(
            (e for e, s in zip(piece.shape, piece.strides, strict=True) if e > 1 and s == columns), 1
        )
        num_columns = next(
            (e for e, s in zip(piece.shape, piece.strides, strict=True) if e > 1 and s == 1), 1
        )
        stretches = [
            (row, num_rows, rows, self._blocks[0]),
            (column, num_columns, columns, self._blocks[1]),
            *zip(piece.start, piece.shape, weight.shape, block, strict=True),
        ]
        if any(not _is_aligned(*stretch) for stretch in stretches):
            raise SourceError(
                f"{name} is assembled from parts of blocks of {self._blocks[0]} by {self._blocks[1]}; "
                "pass --dtype to convert it without them"
            )
        source = scale.pieces[0]
        across = scale.shape[1]
        strides = tuple(
            (across if stride == columns else 1) if extent > 1 else 0
            for extent, stride in zip(piece.shape, piece.strides, strict=True)
        )
        return StridedBox(
            start=tuple(start // length for start, length in zip(piece.start, block, strict=True)),
            shape=tuple(-(-extent // length) for extent, length in zip(piece.shape, block, strict=True)),
            leaf=source.leaf,
            offset=source.offset + row // self._blocks[0] * across + column // self._blocks[1],
            strides=strides,
        )


def _is_aligned(start: int, extent: int, size: int, length: int) -> bool:
    """Whether a stretch begins and ends at boundaries of blocks, or at the end of the dim."""
    return start % length == 0 and ((start + extent) % length == 0 or start + extent == size)


def _blocks(settings: Mapping[str, Any], where: str) -> BlockShape:
    method = str(settings.get("quant_method") or "an unnamed method")
    block = settings.get("weight_block_size")
    if method == "fp8" and isinstance(block, list | tuple) and len(block) == 2:
        return int(block[0]), int(block[1])
    raise SourceError(
        f"{where} is quantized ({method}), which cannot be sharded; convert the unquantized model, or one "
        "in block-scaled fp8 (quant_method fp8 with weight_block_size)"
    )


def _require_pair(name: str, values: LazyTensor, factors: LazyTensor, blocks: BlockShape) -> None:
    expected = tuple(-(-extent // length) for extent, length in zip(values.shape, blocks, strict=False))
    if values.dtype != VALUES_DTYPE or len(values.shape) != 2 or factors.shape != expected:
        raise SourceError(
            f"{name} is {list(factors.shape)}, factors for {values.dtype} {list(values.shape)}, and should "
            f"be {list(expected)} for a matrix in {VALUES_DTYPE} with blocks of {blocks[0]} by {blocks[1]}"
        )
