"""Keep full experts on each rank (``--experts ep``): change the tape, and forbid to shard inside of experts.

Modules that are called with ids are proven and become one operator each. Stacks that every token is
multiplied with, as a batch of matrices whose products are summed later, need no ids: the rules shard the dim
of experts by themselves once the other dims are ruled out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardconv_runtime.errors import SolveError
from shardconv_runtime.format import slices
from shardconv_runtime.format.dims import axes_of
from torch import nn

from ..dim_analysis.analysis import Analysis, corresponding_leaves
from ..dim_analysis.composite_modules import ExpertSite, find_experts, isolate
from ..dim_analysis.dim_trees import Node, find, leaves, unify
from ..dim_analysis.matrix_stacks import find_stacks
from ..simulation.expert_sums import NotProven, prove_experts
from ..tracing.fold import Folded
from ..tracing.tape import Mark, Tape
from .layout import Layouts
from .localize import Attribute, SolvedOverride

REMEDY = "use --experts tp, the default, which shards each expert"


def isolate_experts(folded: Folded, model: nn.Module) -> Folded:
    """Fold each module of experts on the tape into one operator."""
    sites = []
    for candidate in find_experts(folded.tape):
        module = model.get_submodule(candidate.fqn)
        try:
            sites.append(ExpertSite(candidate, prove_experts(module, candidate, folded.tape)))
        except NotProven as problem:
            raise SolveError(
                f"--experts ep: {candidate.fqn} could not be proven to be a sum over its experts "
                f"({problem}); {REMEDY}"
            ) from problem
    return replace(folded, tape=isolate(folded.tape, sites))


class ExpertParallel:
    """The demands of ``--experts ep`` on the solution of one model.

    If modules are called with ids, stacks that every token is multiplied with (shared experts) are left to
    the solver.
    """

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        # Code outside of proven modules that picks single matrices of a stack needs all of them on each rank.
        for stack in find_stacks(analysis.tape):
            if stack.is_picked:
                raise _not_distributable(analysis.tape, stack.parameter)
        self.dense = [] if analysis.experts else _dense_stacks(analysis)
        if not analysis.experts and not self.dense:
            raise SolveError(f"--experts ep: the model has no stacks of experts; {REMEDY}")
        for tid in self.dense:
            _join(analysis, tid)

    def forbidden(self) -> list[Node]:
        """Return the dims inside of experts."""
        return [dim for tid in self.dense for dim in self.analysis.dims[tid][1:]]

    def overrides(self, layouts: Layouts) -> dict[Attribute, SolvedOverride]:
        """Return the numbers of experts that become local."""
        out: dict[Attribute, SolvedOverride] = {}
        for site, count in self.analysis.experts:
            layout = layouts.dim(count)
            ranks = range(math.prod(layouts.mesh))
            local = tuple(slices.local_size(layout, layouts.mesh, rank) for rank in ranks)
            if axes_of(layout):
                for path, attribute in site.sharding.overrides:
                    fqn = f"{site.where.fqn}.{path}" if path else site.where.fqn
                    shown = local[:1] if len(set(local)) == 1 else local
                    out[fqn, attribute] = SolvedOverride(site.sharding.num_experts, shown)
        return out

    def notes(self, layouts: Layouts) -> tuple[str, ...]:
        """Describe experts that several ranks hold."""
        notes: dict[str, None] = {}
        num_ranks = math.prod(layouts.mesh)
        dense = [(_owner(self.analysis.tape, tid), self.analysis.dims[tid][0]) for tid in self.dense]
        for owner, count in [(site.where.fqn, count) for site, count in self.analysis.experts] + dense:
            layout = layouts.dim(count)
            num_shards = math.prod(layouts.mesh[a] for a in axes_of(layout))
            if num_ranks > 1 and num_shards == 1:
                raise SolveError(
                    f"--experts ep: the {count.size} experts of {owner} cannot be distributed over "
                    f"{num_ranks} ranks; {REMEDY}, or another --tp"
                )
            if num_shards < num_ranks:
                note = f"{count.size} experts on {num_ranks} ranks: {num_ranks // num_shards} ranks hold each"
                notes[note] = None
        return tuple(notes)


def _dense_stacks(analysis: Analysis) -> list[int]:
    """Return the stacks whose products are summed over the stack."""
    # Leaves over which activations are summed, and leaves that become one of them behind marks. Sums over
    # products with a weight do not count, since such a weight may be a matrix that mixes heads.
    before: dict[Node, list[Node]] = {}
    for a, b in _across_marks(analysis):
        before.setdefault(b, []).append(a)
    summed = set(_reached([find(x) for x in _contracted(analysis)], before))
    out = []
    for stack in find_stacks(analysis.tape):
        if not summed.isdisjoint(leaves(analysis.dims[stack.parameter][0])):  # others are matrices of heads
            out.append(stack.parameter)
    return out


def _not_distributable(tape: Tape, tid: int) -> SolveError:
    return SolveError(
        f"--experts ep: {_owner(tape, tid)} holds stacked matrices ({tape.tensors[tid].name}) that are used "
        f"in a way that cannot be distributed; {REMEDY}"
    )


def _owner(tape: Tape, tid: int) -> str:
    return tape.tensors[tid].name.rpartition(".")[0] or "the model"


def _join(analysis: Analysis, tid: int) -> None:
    """Unify the dim of experts of a stack on both sides of marks, wherever it may be sharded.

    Tensors that are multiplied with it, or read its size, then have the local size from the first mark on.
    """
    counts = leaves(analysis.dims[tid][0])
    neighbors: dict[Node, list[Node]] = {}
    for a, b in _across_marks(analysis):
        if not a.blocked and not b.blocked:
            neighbors.setdefault(a, []).append(b)
            neighbors.setdefault(b, []).append(a)
    for leaf in counts:
        for other in _reached([find(leaf)], neighbors):
            unify(leaf, other)
    contracted = {find(x) for x in _contracted(analysis)}
    if any(find(x).blocked for x in counts) or not any(find(x) in contracted for x in counts):
        raise _not_distributable(analysis.tape, tid)


def _across_marks(analysis: Analysis) -> Iterator[tuple[Node, Node]]:
    """Yield pairs of leaves before and after each mark."""
    for event in analysis.tape.events:
        if isinstance(event, Mark):
            for x, y in zip(analysis.dims[event.source], analysis.dims[event.target], strict=True):
                for a, b in corresponding_leaves(x, y) or ():
                    yield find(a), find(b)


def _reached(start: list[Node], neighbors: Mapping[Node, list[Node]]) -> list[Node]:
    """Return all leaves that can be reached from some leaves."""
    todo, reached = list(start), dict[Node, None]()
    while todo:
        leaf = todo.pop()
        if leaf not in reached:
            reached[leaf] = None
            todo += neighbors.get(leaf, [])
    return list(reached)


def _contracted(analysis: Analysis) -> list[Node]:
    dims: Sequence[Node] = [d for c in analysis.contractions if not c.has_weight for d in c.dims]
    return [x for dim in dims for x in leaves(dim)]
