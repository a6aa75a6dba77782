"""Keeps a solution from splitting block-scaled parameters inside of blocks.

Where the tree of a dim allows it, the positions of a block become an inner factor that is not split; the
solver then shares out whole blocks, unevenly too. What cannot be told by such a factor (heads of one and a
half blocks) is looked at when a solution is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from shardconv_runtime.format.block_scales import is_split_between
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import ParameterPlan

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Conflict, Node, leaves, split
from ..tracing.fold import Folded
from .annotate import Solution, stand_in
from .localize import Unlocalizable

Blocks = Mapping[str, tuple[int, ...]]
"""Sizes of the blocks of the parameters that have some, one for each dim."""


def split_at_blocks(analysis: Analysis, folded: Folded, blocks: Blocks) -> list[Node]:
    """Make blocks a factor of the dims of the parameters that have some; the leaves that must stay whole."""
    forbidden: list[Node] = []
    by_name = {info.name: tid for tid, info in enumerate(analysis.tape.tensors) if info.name}
    stand_ins = folded.representatives()
    for tid, sizes in {
        by_name.get(stand_in(name, stand_ins)): sizes for name, sizes in blocks.items()
    }.items():
        if tid is None or tid not in analysis.dims:
            continue
        for dim, block in zip(analysis.dims[tid], sizes, strict=True):
            with suppress(Conflict):
                if block > 1:
                    forbidden += leaves(split(dim, block)[1])
    return forbidden


def require_whole_blocks(solution: Solution, parameters: Iterable[ParameterPlan], blocks: Blocks) -> None:
    """Check that each rank's part of block-scaled parameters begins and ends between blocks.

    Raises:
        Unlocalizable: it does not in some dim, which must stay whole then.
    """
    if not blocks:
        return
    analysis = solution.analysis
    by_name = {info.name: tid for tid, info in enumerate(analysis.tape.tensors) if info.name}
    stand_ins = solution.folded.representatives()
    for entry in parameters:
        for name in expand_all(entry.names):
            for index, (dim, block) in enumerate(zip(entry.dims, blocks.get(name, ()), strict=False)):
                if not is_split_between(dim, block, solution.layouts.mesh):
                    tid = by_name[stand_in(name, stand_ins)]
                    raise Unlocalizable([analysis.dims[tid][index]], f"{name} has blocks of {block}")
