"""Windows and interpolation over the last dims, which must be replicated; the other dims pass through."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .. import dim_trees

if TYPE_CHECKING:
    from ...tracing.tape import Op
    from ..analysis import Partial
    from ..rule_builder import Arguments, Builder


def average(b: Builder, op: Op, args: Arguments) -> None:
    """Means of windows, and interpolation: linear. The operator's name says over how many dims."""
    _over_last_dims(b, op, b.partial(op.inputs[0]))


def windows(b: Builder, op: Op, args: Arguments) -> None:
    """``im2col``: ``[(N,) C, H, W]`` to ``[(N,) C * elements of a window, windows]``."""
    dims = list(b.tensor(op.inputs[0]))
    for dim in dims[-2:]:
        b.block_dim(dim)
    elements, count = dim_trees.leaf(math.prod(args["kernel_size"]), True), b.shape(op.outputs[0])[-1]
    laid_out = dim_trees.product([dims[-3], elements])
    b.set(op.outputs[0], [*dims[:-3], laid_out, *b.blocked(count)], b.partial(op.inputs[0]))


def largest(b: Builder, op: Op, args: Arguments) -> None:
    """The largest of each window, and where it was."""
    b.never_partial(op.inputs[0])
    _over_last_dims(b, op, None)


def _over_last_dims(b: Builder, op: Op, state: Partial | None) -> None:
    count = next(n for n in (1, 2, 3) if f"{n}d" in op.name)
    dims = b.tensor(op.inputs[0])
    for dim in dims[-count:]:
        b.block_dim(dim)
    for tid in op.outputs:
        b.set(tid, [*dims[:-count], *b.blocked(*b.shape(tid)[-count:])], state)


RULES = {
    **dict.fromkeys(
        (
            "aten.avg_pool1d",
            "aten.avg_pool2d",
            "aten.avg_pool3d",
            "aten.adaptive_avg_pool1d",
            "aten.adaptive_avg_pool2d",
            "aten.upsample_nearest1d",
            "aten.upsample_nearest2d",
            "aten.upsample_bilinear2d",
            "aten.upsample_bicubic2d",
            "aten._upsample_bilinear2d_aa",
            "aten._upsample_bicubic2d_aa",
            "aten.upsample_linear1d",
        ),
        average,
    ),
    "aten.im2col": windows,
    **dict.fromkeys(("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool2d_with_indices"), largest),
}
