"""Operators that reduce a dim or need all of it.

Windows and interpolation over the last dims are among them: these dims must be replicated, and the others
pass through.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from . import dim_trees, pointwise_rules
from .dim_trees import Node
from .rule_builder import NotCovered

if TYPE_CHECKING:
    from ..tracing.tape import Op
    from .analysis import Partial
    from .rule_builder import Arguments, Builder


def _reduced(args: Arguments, rank: int) -> list[int]:
    numbers = args["dim"]
    if numbers is None or numbers == []:
        return list(range(rank))
    return [d % rank for d in (numbers if isinstance(numbers, (list, tuple)) else [numbers])] if rank else []


def _remaining(b: Builder, dims: list[Node], reduced: list[int], rank: int) -> list[Node]:
    if rank == len(dims):
        return [dim_trees.leaf(1) if i in reduced else d for i, d in enumerate(dims)]
    return [d for i, d in enumerate(dims) if i not in reduced]


def sum_(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze a sum as a contraction: over a sharded dim it is partial."""
    source, target = op.inputs[0], op.outputs[0]
    dims = list(b.tensor(source))
    reduced = _reduced(args, len(dims))
    rank = len(b.shape(target))
    b.set(target, _remaining(b, dims, reduced, rank), b.contract([dims[i] for i in reduced], source))


def mean(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze a mean, which is linear, over dims that must be replicated."""
    source, target = op.inputs[0], op.outputs[0]
    dims = list(b.tensor(source))
    reduced = _reduced(args, len(dims))
    for i in reduced:
        b.block_dim(dims[i])
    b.set(target, _remaining(b, dims, reduced, len(b.shape(target))), b.partial(source))


def reduce(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze any other reduction (``max``, ``var``, ``argmax``, ``norm``, ``any`` …).

    ``max`` of two tensors is pointwise.
    """
    if args.tensor("other") is not None:
        pointwise_rules.nonlinear(b, op, args)
        return
    source = op.inputs[0]
    dims = list(b.tensor(source))
    reduced = _reduced(args, len(dims))
    b.never_partial(*op.inputs)
    for i in reduced:
        b.block_dim(dims[i])
    for tid in op.outputs:
        b.set(tid, _remaining(b, dims, reduced, len(b.shape(tid))))


def along(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze operators that need all of a dim and keep the shape: ``softmax``, ``sort``, ``cumprod`` …"""
    source = op.inputs[0]
    dims = b.tensor(source)
    b.never_partial(*op.inputs)
    for i in _reduced(args, len(dims)):
        b.block_dim(dims[i])
    for tid in op.outputs:
        b.set(tid, dims)


def cumsum(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``cumsum``, which is linear, along a dim that must be replicated."""
    source = op.inputs[0]
    dims = b.tensor(source)
    b.block_dim(dims[args["dim"]])
    b.set(op.outputs[0], dims, b.partial(source))


def topk(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``topk``, which puts a new dim in place of one that must be replicated."""
    source = op.inputs[0]
    b.never_partial(source)
    for tid in op.outputs:
        dims = list(b.tensor(source))
        b.block_dim(dims[args["dim"]])
        dims[args["dim"]] = dim_trees.leaf(b.shape(tid)[args["dim"]], True)
        b.set(tid, dims)


def triangle(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``tril`` and ``triu``, which are linear, and whose last two dims must be replicated."""
    dims = b.tensor(op.inputs[0])
    for dim in dims[-2:]:
        b.block_dim(dim)
    b.set(op.outputs[0], dims, b.partial(op.inputs[0]))


def norm(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``layer_norm`` and ``rms_norm`` over trailing dims."""
    source = op.inputs[0]
    dims = b.tensor(source)
    b.never_partial(*op.inputs)
    count = len(args["normalized_shape"])
    for i in range(1, count + 1):
        b.block_dim(dims[-i])
        for tid in op.inputs[1:]:
            dim_trees.unify(b.tensor(tid)[-i], dims[-i])
    b.set(op.outputs[0], dims)
    for tid in op.outputs[1:]:
        b.set(tid, b.blocked(*b.shape(tid)))


def group_norm(b: Builder, op: Op, args: Arguments) -> None:
    """Block all dims of ``group_norm``: ranks could hold complete groups, but the group count is a
    literal."""
    b.block(*op.inputs)
    for tid in op.outputs:
        b.set(tid, b.blocked(*b.shape(tid)))


def batch_norm(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``batch_norm``: each channel by itself, with running statistics, or with statistics over all
    other dims."""
    if args["training"] and args.tensor("running_mean") is not None:
        raise NotCovered  # they are written
    dims = b.tensor(op.inputs[0])
    b.never_partial(*op.inputs)
    if args["training"]:
        for dim in (dims[0], *dims[2:]):
            b.block_dim(dim)
    for tid in op.inputs[1:]:
        dim_trees.unify(b.tensor(tid)[0], dims[1])
    b.set(op.outputs[0], dims)


def weight_norm(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``_weight_norm``: a matrix divided by its norms over all dims but one, times scales along that
    one."""
    matrix, scales = op.inputs
    dims, kept_dim = b.tensor(matrix), args["dim"]
    b.never_partial(*op.inputs)
    for i, dim in enumerate(dims):
        if kept_dim == -1 or i != kept_dim:
            b.block_dim(dim)
        else:
            dim_trees.unify(dim, b.tensor(scales)[i])
    b.set(op.outputs[0], dims)


def solve_triangular(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze systems of equations, one for each position of the leading dims."""
    b.never_partial(*op.inputs)
    for tid in op.inputs:
        for dim in b.tensor(tid)[-2:]:
            b.block_dim(dim)
    matrix, right = (list(b.tensor(t)) for t in op.inputs[:2])
    for x, y in zip(matrix[:-2], right[:-2], strict=True):
        dim_trees.unify(x, y)
    lead = [x if x.size >= y.size else y for x, y in zip(matrix[:-2], right[:-2], strict=True)]
    b.set(op.outputs[0], [*lead, *right[-2:]])


def average(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze means of windows, and interpolation, which are linear."""
    _over_last_dims(b, op, b.partial(op.inputs[0]))


def windows(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``im2col``: ``[(N,) C, H, W]`` to ``[(N,) C * elements of a window, windows]``."""
    dims = list(b.tensor(op.inputs[0]))
    for dim in dims[-2:]:
        b.block_dim(dim)
    elements, count = dim_trees.leaf(math.prod(args["kernel_size"]), True), b.shape(op.outputs[0])[-1]
    laid_out = dim_trees.product([dims[-3], elements])
    b.set(op.outputs[0], [*dims[:-3], laid_out, *b.blocked(count)], b.partial(op.inputs[0]))


def largest(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze the largest of each window, and where it was."""
    b.never_partial(op.inputs[0])
    _over_last_dims(b, op, None)


def _over_last_dims(b: Builder, op: Op, state: Partial | None) -> None:
    """Pass all dims through but the last ones, whose number is in the operator's name."""
    count = next(n for n in (1, 2, 3) if f"{n}d" in op.name)
    dims = b.tensor(op.inputs[0])
    for dim in dims[-count:]:
        b.block_dim(dim)
    for tid in op.outputs:
        b.set(tid, [*dims[:-count], *b.blocked(*b.shape(tid)[-count:])], state)


RULES = {
    "aten.linalg_solve_triangular": solve_triangular,
    "aten.sum": sum_,
    "aten.mean": mean,
    **dict.fromkeys(
        (
            "aten.max",
            "aten.min",
            "aten.amax",
            "aten.amin",
            "aten.argmax",
            "aten.argmin",
            "aten.var",
            "aten.std",
            "aten.var_mean",
            "aten.prod",
            "aten.any",
            "aten.all",
            "aten.logsumexp",
            "aten.linalg_vector_norm",
            "aten.norm",
        ),
        reduce,
    ),
    **dict.fromkeys(
        (
            "aten.softmax",
            "aten._softmax",
            "aten.log_softmax",
            "aten._log_softmax",
            "aten.sort",
            "aten.cumprod",
            "aten.argsort",
            "aten.cummax",
            "aten.cummin",
            "aten.logcumsumexp",
        ),
        along,
    ),
    "aten.cumsum": cumsum,
    "aten.topk": topk,
    **dict.fromkeys(("aten.tril", "aten.triu"), triangle),
    **dict.fromkeys(
        ("aten.layer_norm", "aten.native_layer_norm", "aten.rms_norm", "aten._fused_rms_norm"), norm
    ),
    "aten.batch_norm": batch_norm,
    "aten._weight_norm": weight_norm,
    **dict.fromkeys(("aten.group_norm", "aten.native_group_norm"), group_norm),
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
