"""Keeps a solution from sharding block-scaled parameters inside of blocks.

Where the tree of a dim allows it, the positions of a block become an inner factor that is not sharded; the
solver then distributes full blocks, unevenly too. Where no such factor exists (heads of one and a half
blocks), the solution is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from shardconv_runtime.format.block_scales import is_sharded_between
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import ParameterPlan

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Conflict, Node, leaves, split
from ..tracing.fold import Folded
from .obstacle import Obstacle
from .solution import Solution, stand_in

BlockSizes = Mapping[str, tuple[int, ...]]
"""FQN of each block-scaled parameter -> the size of its blocks in each dim."""


def split_at_blocks(analysis: Analysis, folded: Folded, blocks: BlockSizes) -> list[Node]:
    """Make blocks a factor of the dims of block-scaled parameters.

    Returns:
        The leaves inside of blocks, which must stay replicated.
    """
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


def find_divided_block(
    solution: Solution, parameters: Iterable[ParameterPlan], blocks: BlockSizes
) -> Obstacle | None:
    """The first dim of a block-scaled parameter in which a shard begins or ends inside of a block."""
    if not blocks:
        return None
    analysis = solution.analysis
    by_name = {info.name: tid for tid, info in enumerate(analysis.tape.tensors) if info.name}
    stand_ins = solution.folded.representatives()
    for entry in parameters:
        for name in expand_all(entry.names):
            for index, (dim, block) in enumerate(zip(entry.dims, blocks.get(name, ()), strict=False)):
                if not is_sharded_between(dim, block, solution.layouts.mesh):
                    tid = by_name[stand_in(name, stand_ins)]
                    return Obstacle((analysis.dims[tid][index],), f"{name} has blocks of {block}")
    return None
