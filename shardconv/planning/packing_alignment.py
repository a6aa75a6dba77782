"""Keeps a solution from cutting packed parameters inside of their steps.

Where the tree of a dim allows it, the positions of a step become an inner factor that is not sharded; the
solver then distributes full steps, unevenly too. Where no such factor exists (heads of one and a half
steps), the solution is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.packed_layout import is_sharded_between
from shardconv_runtime.format.plan import ParameterPlan

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Conflict, Node, leaves, split
from ..tracing.fold import Folded
from .obstacle import Obstacle
from .solution import Solution, stand_in

Steps = Mapping[str, tuple[int, ...]]
"""FQN of each packed parameter -> the steps in which it may be cut, for each dim."""


def split_at_steps(analysis: Analysis, folded: Folded, steps: Steps) -> list[Node]:
    """Make steps a factor of the dims of packed parameters.

    Returns:
        The leaves inside of steps, which must stay replicated.
    """
    forbidden: list[Node] = []
    by_name = {info.name: tid for tid, info in enumerate(analysis.tape.tensors) if info.name}
    stand_ins = folded.representatives()
    kinds = {(by_name.get(stand_in(name, stand_ins)), sizes) for name, sizes in steps.items()}
    for tid, sizes in sorted((tid, sizes) for tid, sizes in kinds if tid is not None):
        if tid not in analysis.dims:
            continue
        for dim, step in zip(analysis.dims[tid], sizes, strict=True):
            with suppress(Conflict):
                if step > 1:
                    forbidden += leaves(split(dim, step)[1])
    return forbidden


def find_divided_step(
    solution: Solution, parameters: Iterable[ParameterPlan], steps: Steps
) -> Obstacle | None:
    """The first dim of a packed parameter in which a rank's part begins or ends inside of a step."""
    if not steps:
        return None
    analysis = solution.analysis
    by_name = {info.name: tid for tid, info in enumerate(analysis.tape.tensors) if info.name}
    stand_ins = solution.folded.representatives()
    for entry in parameters:
        checked: set[tuple[int, ...]] = set()
        for name in expand_all(entry.names):
            sizes = steps.get(name, ())
            if sizes in checked:
                continue
            checked.add(sizes)
            for index, (dim, step) in enumerate(zip(entry.dims, sizes, strict=False)):
                if not is_sharded_between(dim, step, solution.layouts.mesh):
                    tid = by_name[stand_in(name, stand_ins)]
                    return Obstacle((analysis.dims[tid][index],), f"{name} is packed in steps of {step}")
    return None
