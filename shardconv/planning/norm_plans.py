"""How the norms over a sharded dim compute on shards."""

from __future__ import annotations

import math
from dataclasses import replace

from shardconv_runtime.format.plan import NormInfo
from shardconv_runtime.format.slices import local_size
from torch import nn

from ..dim_analysis.analysis import NormUse
from ..dim_analysis.dim_trees import Node, leaves
from ..matching.norm_formulas import fit_norm
from .layout import Layouts
from .obstacle import Obstacle


def norm_plans(model: nn.Module, layouts: Layouts) -> dict[str, NormInfo] | Obstacle:
    """The norms over a sharded dim, proven on numbers, by FQN.

    Args:
        model: the global model, on meta.
        layouts: of its tensors.

    Returns:
        An obstacle where no formula of the runtime computes the same as a norm, or where the calls of one are
        not all on shards of the same dims: it is given one formula for all of them.
    """
    several = _on_other_shards(layouts)
    if several is not None:
        return several
    out: dict[str, NormInfo] = {}
    for use in layouts.analysis.norms:
        axes = _axes(use.normalized, layouts)
        has_sharded_groups = use.site.groups > 1 and bool(_axes(use.groups, layouts))
        fqn = use.site.fqn
        if fqn in out or not (axes or has_sharded_groups):
            continue
        info = fit_norm(model.get_submodule(fqn), use.site, layouts.analysis.tape)
        if info is None:
            nodes = (*leaves(use.groups), *leaves(use.normalized))
            return Obstacle(nodes, f"the runtime has no formula for the norm {fqn} on shards")
        out[fqn] = replace(info, axes=axes, groups=_sizes(use.groups, layouts))
    return out


def _on_other_shards(layouts: Layouts) -> Obstacle | None:
    """The first norm of which some calls are on shards and others on tensors of other shapes; None if there
    is none."""
    first: dict[str, NormUse] = {}
    for use in layouts.analysis.norms:
        fqn = use.site.fqn
        trees = [(u.groups, u.normalized) for u in (first.setdefault(fqn, use), use)]
        one, two = ([(_axes(n, layouts), _sizes(n, layouts)) for n in each] for each in trees)
        if one != two and any(axes for axes, _ in (*one, *two)):
            nodes = tuple(x for each in trees for n in each for x in leaves(n))
            return Obstacle(nodes, f"the norm {fqn} is called on shards and on other tensors", fqn)
    return None


def _axes(node: Node, layouts: Layouts) -> tuple[int, ...]:
    return tuple(sorted({a for x in leaves(node) for a in layouts.assignment.axes(x)}))


def _sizes(node: Node, layouts: Layouts) -> tuple[int, ...]:
    """The local size of a dim: one if all ranks have the same, else one for each."""
    mesh = layouts.mesh
    sizes = [local_size(layouts.dim(node), mesh, rank) for rank in range(math.prod(mesh))]
    return tuple(sizes) if len(set(sizes)) > 1 else (sizes[0],)
