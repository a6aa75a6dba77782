"""A module of experts as one operator: a sum over the experts, whose dim may be sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import dim_trees
from ..sites import EXPERTS

if TYPE_CHECKING:
    from ...tracing.tape import Op
    from ..rule_builder import Arguments, Builder
    from ..sites import ExpertSite


def experts(b: Builder, op: Op, args: Arguments) -> None:
    """``sum over k of weights[..., k] * expert[ids[..., k]](x)``.

    All dims but that of experts are replicated."""
    site: ExpertSite = op.kwargs["site"]
    b.block(*site.where.inputs)
    count = dim_trees.leaf(site.sharding.num_experts)
    for tid in site.where.parameters:
        first, *others = b.tensor(tid)
        outer, inner = b.split(first, first.size // count.size)
        dim_trees.unify(count, outer)
        for dim in (inner, *others):
            b.block_dim(dim)
        b.never_partial(tid)
    b.work([count])
    target = op.outputs[0]
    b.set(target, b.blocked(*b.shape(target)), b.contract([count]))
    b.result.experts.append((site, count))


RULES = {EXPERTS: experts}
