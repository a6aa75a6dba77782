"""Block-scaled parameters: float8 values, and one factor for each block of them.

The factors of NAME are a tensor of their own in the files, NAME_scale_inv, as in published
checkpoints: element (i, j) of a parameter with blocks of (128, 128) has the factor
(i // 128, j // 128). A rank holds the factors of its values, so its part must begin and end between blocks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import PlanError
from .dims import Dim, size, to_text
from .plan import ParameterPlan
from .slices import Mesh, Range, ranges
from .stored_layout import block_dim

if TYPE_CHECKING:
    import torch
    from torch import Tensor


VALUES_DTYPE = "float8_e4m3fn"


def check_blocks(entry: ParameterPlan, mesh: Mesh) -> None:
    """Check that each rank's part begins and ends between blocks.

    Raises:
        PlanError: it does not in some dim.
    """
    for dim, block in zip(entry.dims, entry.block, strict=True):
        if not is_sharded_between(dim, block, mesh):
            raise PlanError(
                f"{entry.names[0]}: dim {to_text(dim)} is sharded inside of blocks of {block}, "
                "which share a factor"
            )


def is_sharded_between(dim: Dim, block: int, mesh: Mesh) -> bool:
    """Whether each rank's part of a dim, and each of its segments, begins and ends between blocks."""
    factors = block_dim(dim, block)
    return size(factors) == math.ceil(size(dim) / block) and all(
        _positions(ranges(factors, mesh, rank), block, size(dim)) == ranges(dim, mesh, rank)
        for rank in range(math.prod(mesh))
    )


def dequantized(values: Tensor, factors: Tensor, block: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values times their factors, of the shape of the values; no collective runs.

    Args:
        values: local ``[n, m]`` (any number of dims), of any float8 dtype.
        factors: local ``[ceil(n / block[0]), ceil(m / block[1])]``; a dim's last block may be shorter.
        block: sizes of the blocks, one for each dim.
        dtype: of the result; the product is computed in float32.
    """
    factors = factors.float()
    for dim, length in enumerate(block):
        if length > 1:
            factors = factors.repeat_interleave(length, dim).narrow(dim, 0, values.shape[dim])
    return (values.float() * factors).to(dtype)


def _positions(spans: tuple[Range, ...], block: int, extent: int) -> tuple[Range, ...]:
    return tuple((start * block, min(stop * block, extent)) for start, stop in spans)
