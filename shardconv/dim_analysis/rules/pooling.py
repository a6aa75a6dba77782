"""Windows and interpolation over the last dims, which must be replicated; the other dims pass through."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...tracing.tape import Op
    from ..analysis import Partial
    from ..rule_builder import Arguments, Builder


def average(b: Builder, op: Op, args: Arguments) -> None:
    """Means of windows, and interpolation: linear. The operator's name says over how many dims."""
    _over_last_dims(b, op, b.partial(op.inputs[0]))


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
            "aten.upsample_linear1d",
        ),
        average,
    ),
    **dict.fromkeys(("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool2d_with_indices"), largest),
}
