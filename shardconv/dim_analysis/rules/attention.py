"""Attention as one operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import dim_trees

if TYPE_CHECKING:
    from ...tracing.tape import Op
    from ..rule_builder import Arguments, Builder


def attention(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``scaled_dot_product_attention``: query [.., H, L, E], key [.., G, S, E], value [.., G, S, V].

    With grouped heads, H is G times the group, G being the outer factor.
    """
    query, key, value = op.inputs[:3]
    mask = args.tensor("attn_mask")
    b.never_partial(*op.inputs)
    q, k, v = (b.tensor(t) for t in (query, key, value))
    for dim in (*q[-2:], *k[-2:], v[-2]):
        b.block_dim(dim)
    dim_trees.unify(k[-2], v[-2])
    dim_trees.unify(q[-1], k[-1])
    for x, y in zip(k[:-2], v[:-2], strict=True):
        dim_trees.unify(x, y)
    for index, (x, y) in enumerate(zip(q[:-2], k[:-2], strict=True)):
        if x.size == y.size or y.size == 1:
            dim_trees.unify(x, y)
        elif index == len(q) - 3 and args["enable_gqa"]:
            outer, _ = b.split(x, x.size // y.size)
            dim_trees.unify(outer, y)
        else:
            b.block_dim(x)
            b.block_dim(y)
    if mask is not None:
        scores, masked = [*q[:-1], k[-2]], b.tensor(mask)
        for dim, score in zip(masked, scores[len(scores) - len(masked) :], strict=True):
            if dim.size == score.size:
                dim_trees.unify(dim, score)
            else:
                b.block_dim(dim)
    lead = [x if x.size >= y.size else y for x, y in zip(q[:-2], k[:-2], strict=True)]
    b.work([*q, k[-2]])
    b.set(op.outputs[0], [*lead, q[-2], v[-1]])


RULES = {"aten.scaled_dot_product_attention": attention}
