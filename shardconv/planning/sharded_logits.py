"""Which gather at the end of a model may be left out: that of logits, which nothing else reads."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

from shardconv_runtime.format.plan import AllGatherStep, LogitsInfo

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Node, leaves
from ..tracing.tape import Mark
from .mark_steps import steps_at
from .solution import Solution

_Holders = defaultdict[Node, set[int]]
"""Leaf -> the tensors that have it."""


def logits_info(solution: Solution) -> LogitsInfo | None:
    """The one gather at a module's output that nothing but the model's own output needs."""
    holders = _holders(solution.analysis)
    for event in reversed(solution.analysis.tape.events):
        if not isinstance(event, Mark) or not event.is_output:
            continue
        gathered = [step.dim for step in steps_at(solution, event) if isinstance(step, AllGatherStep)]
        if len(gathered) == 1 and _may_stay_sharded(solution.analysis, holders, event, gathered[0]):
            return LogitsInfo(solution.fqn(event), event.slots[0])
    return None


def _may_stay_sharded(analysis: Analysis, holders: _Holders, mark: Mark, dim: int) -> bool:
    """Whether a dim, if left sharded after this mark, reaches only outputs of the model."""
    tape = analysis.tape
    if dim != len(tape.tensors[mark.target].shape) - 1:
        return False
    reached, region = _region(analysis, holders, set(leaves(analysis.dims[mark.target][dim])))
    if any(tape.tensors[t].kind != "value" for t in region):
        return False  # for example, what it is added to is replicated
    contracted = {x for c in analysis.contractions for d in c.dims for x in leaves(d)}
    blocked = any(x.blocked for x in reached)
    replayed = any(set(r.outputs) & region for r in tape.replays)
    slots = {e.slots for e in tape.events if isinstance(e, Mark) and e.call == 0 and e.target in region}
    return not blocked and not replayed and not contracted & reached and slots == {("output.logits",)}


def _holders(analysis: Analysis) -> _Holders:
    found: _Holders = defaultdict(set)
    for tensor, dims in analysis.dims.items():
        for leaf in chain.from_iterable(map(leaves, dims)):
            found[leaf].add(tensor)
    return found


def _region(analysis: Analysis, holders: _Holders, reached: set[Node]) -> tuple[set[Node], set[int]]:
    """The leaves that these become behind marks, and all tensors that have one of them."""
    region = set().union(*(holders[leaf] for leaf in reached))
    for event in analysis.tape.events:
        if isinstance(event, Mark) and event.source in region and event.target not in region:
            for before, after in zip(analysis.dims[event.source], analysis.dims[event.target], strict=True):
                if not reached.isdisjoint(leaves(before)):
                    reached = reached | set(leaves(after))
                    region |= set().union(*(holders[leaf] for leaf in leaves(after)))
    return reached, region
