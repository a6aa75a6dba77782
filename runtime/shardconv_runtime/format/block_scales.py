"""Block-scaled parameters: float8 values, and one factor for each block of them.

The factors of NAME are a tensor of their own in the files, NAME_scale_inv, as in published
checkpoints: element (i, j) of a parameter with blocks of (128, 128) has the factor
(i // 128, j // 128). A rank holds the factors of the values that it holds, so ranks' parts must begin and
end between blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import PlanError
from .dims import Dim, Leaf, Sum, leaves, segments, size, to_text
from .plan import ParameterPlan, Plan, by_name
from .slices import Mesh, Range, ranges

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUFFIX = "_scale_inv"

VALUES_DTYPE = "float8_e4m3fn"


def stored_entries(plan: Plan) -> Iterator[ParameterPlan]:
    """What the files hold: the parameters, each followed by its factors if it has blocks."""
    for entry in plan.parameters:
        yield entry
        if entry.block:
            yield factors_entry(entry)


def stored_plans(plan: Plan) -> dict[str, ParameterPlan]:
    """The entry of each tensor in the files by its name.

    Raises:
        PlanError: two entries claim one name, or the patterns stand for too many names.
    """
    return by_name("parameters", tuple(stored_entries(plan)))


def factors_entry(entry: ParameterPlan) -> ParameterPlan:
    """How the factors of a parameter with blocks are laid out."""
    dims = tuple(map(_block_dim, entry.dims, entry.block))
    names = tuple(name + SUFFIX for name in entry.names)
    return replace(entry, names=names, dims=dims, dtype=entry.block_dtype, block=(), block_dtype="")


def check_blocks(entry: ParameterPlan, mesh: Mesh) -> None:
    """Check that each rank's part begins and ends between blocks.

    Raises:
        PlanError: it does not in some dim.
    """
    for dim, block in zip(entry.dims, entry.block, strict=True):
        if not is_split_between(dim, block, mesh):
            raise PlanError(
                f"{entry.names[0]}: dim {to_text(dim)} is split inside of blocks of {block}, "
                "which share a factor"
            )


def is_split_between(dim: Dim, block: int, mesh: Mesh) -> bool:
    """Whether each rank's part of a dim, and each of its segments, begins and ends between blocks."""
    factors = _block_dim(dim, block)
    return size(factors) == math.ceil(size(dim) / block) and all(
        _positions(ranges(factors, mesh, rank), block, size(dim)) == ranges(dim, mesh, rank)
        for rank in range(math.prod(mesh))
    )


def dequantized(values: Tensor, factors: Tensor, block: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values times their factors.

    Args:
        values: local, of any float8 dtype.
        factors: local, one for each block; a dim's last block may be cut short.
        block: sizes of the blocks, one for each dim.
        dtype: of the result; the product is computed in float32.
    """
    factors = factors.float()
    for dim, length in enumerate(block):
        if length > 1:
            factors = factors.repeat_interleave(length, dim).narrow(dim, 0, values.shape[dim])
    return (values.float() * factors).to(dtype)


def _block_dim(dim: Dim, block: int) -> Dim:
    """The blocks of a dim, as a dim; only a split that ``check_blocks`` accepts is the same split."""
    if block == 1:
        return dim
    blocks = []
    for segment in segments(dim):
        axes = dict.fromkeys(axis for leaf in leaves(segment) for axis in leaf.axes)
        blocks.append(Leaf(math.ceil(size(segment) / block), tuple(axes)))
    return blocks[0] if len(blocks) == 1 else Sum(tuple(blocks))


def _positions(spans: tuple[Range, ...], block: int, extent: int) -> tuple[Range, ...]:
    return tuple((start * block, min(stop * block, extent)) for start, stop in spans)
