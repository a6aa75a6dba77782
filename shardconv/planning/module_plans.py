"""Plan modules: the steps at their boundaries, their overrides, and the category of each.

Modules are recognized by their computation: a product with a sharded parameter is column-parallel if its
output is sharded, and row-parallel if its output is partial; a lookup in sharded rows is vocab-parallel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import chain

from shardconv_runtime.format.dims import Dim, axes_of
from shardconv_runtime.format.module_steps import (
    AllGatherStep,
    AllReduceStep,
    GradAllReduceStep,
    GradDivideStep,
    KeepOnFirstStep,
    LocalRowsOrEndStep,
    LocalRowsStep,
    ModuleStep,
    ReduceScatterStep,
    ReshardingStep,
    SliceStep,
    ZeroOutOfShardStep,
)
from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import AttributeOverride, LogitsInfo, ModulePlan, NormInfo
from shardconv_runtime.format.slices import local_size
from torch import nn

from ..dim_analysis.analysis import Analysis, NormUse
from ..dim_analysis.dim_trees import Node, leaves
from ..dim_analysis.rules import traits_of
from ..simulation.norm_formulas import fit_norm
from ..tracing.tape import Mark, Op, starred
from .conflict import Conflict, joined
from .gradients import PARTIAL, REPLICATED
from .layout import Layouts
from .solution import Solution


def steps_at(solution: Solution, mark: Mark) -> list[ModuleStep]:
    """Return the steps of a mark, where a tensor passes the boundary of a module.

    In this order, they reduce, gather, slice, or keep the tensor on one rank. There are none if the placement
    stays.
    """
    analysis, layouts = solution.analysis, solution.layouts
    width = solution.per_token(mark.source)
    out: list[ModuleStep] = []
    reduced, kept_axes = solution.reduced_axes(mark), solution.kept_axes(mark)
    before_axes, after_axes = (solution.gradients.axes(t) for t in (mark.source, mark.target))
    pairs = [
        (i, layouts.open_dim(x), layouts.open_dim(y))
        for i, (x, y) in enumerate(zip(analysis.dims[mark.source], analysis.dims[mark.target], strict=True))
    ]
    changed = [(i, before, after) for i, before, after in pairs if before != after]
    gathered = [(i, before) for i, before, _ in changed if axes_of(before)]
    sliced = [(i, after) for i, _, after in changed if axes_of(after)]
    for port in mark.ports:
        if reduced and not gathered and [axes_of(d) for _, d in sliced] == [frozenset(reduced)]:
            out.append(ReduceScatterStep(port, *sliced[0], width))
        else:
            if reduced:
                grad_axes = _among(after_axes, reduced)
                out.append(AllReduceStep(port, reduced, width, grad_axes))
            full = (*before_axes, *_among(after_axes, reduced))
            out += [_step(AllGatherStep, port, *each, width, after_axes, before_axes) for each in gathered]
            out += [_step(SliceStep, port, *each, width, full, after_axes) for each in sliced]
        if kept_axes:
            out.append(KeepOnFirstStep(port, kept_axes, width))
        out += _gradient_steps(solution, mark, port, width)
    return out


def _step(
    kind: type[AllGatherStep | SliceStep],
    port: str,
    dim: int,
    layout: Dim,
    per_token: int,
    grad_axes: Collection[int],
    local_grad_axes: Collection[int],
) -> ModuleStep:
    full, local = (_among(each, axes_of(layout)) for each in (grad_axes, local_grad_axes))
    return kind(port, dim, layout, per_token, full, local)


def _among(some: Collection[int], others: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(set(some) & set(others)))


def _gradient_steps(solution: Solution, mark: Mark, port: str, per_token: int) -> list[ModuleStep]:
    """Return the steps of a tensor without other steps whose gradient is partial on one side only."""
    before, after = (solution.gradients.axes(t) for t in (mark.source, mark.target))
    steps = [
        axis
        for axis in range(len(solution.layouts.mesh))
        if solution.placement(mark.source, axis) == REPLICATED
        and solution.placement(mark.target, axis) in (REPLICATED, PARTIAL)
    ]
    summed = _among([a for a in after if a not in before], steps)
    divided = _among([a for a in before if a not in after], steps)
    out: list[ModuleStep] = [GradAllReduceStep(port, summed, per_token)] if summed else []
    return [*out, GradDivideStep(port, divided)] if divided else out


_Holders = defaultdict[Node, set[int]]
"""Leaf -> the tensors that have it."""


def _holders(analysis: Analysis) -> _Holders:
    holders: _Holders = defaultdict(set)
    for tensor, dims in analysis.dims.items():
        for leaf in chain.from_iterable(map(leaves, dims)):
            holders[leaf].add(tensor)
    return holders


def logits_info(solution: Solution) -> LogitsInfo | None:
    """Return the gather at a module's output that only the model's logits need, and that may be left out."""
    holders = _holders(solution.analysis)
    for event in reversed(solution.analysis.tape.events):
        if not isinstance(event, Mark) or not event.is_output:
            continue
        gathered = [step.dim for step in steps_at(solution, event) if isinstance(step, AllGatherStep)]
        if len(gathered) == 1 and _may_stay_sharded(solution.analysis, holders, event, gathered[0]):
            return LogitsInfo(solution.fqn(event), event.ports[0])
    return None


def logits_region(solution: Solution) -> set[int]:
    """Return the tensors with the dim of the logits whose gather may be left out, from that gather on."""
    analysis, info = solution.analysis, logits_info(solution)
    if info is None:
        return set()
    marks = [
        event
        for event in analysis.tape.events
        if isinstance(event, Mark) and solution.fqn(event) == info.module and info.port in event.ports
    ]
    last = {leaf for mark in marks for leaf in leaves(analysis.dims[mark.target][-1])}
    return _region(analysis, _holders(analysis), last)[1]


def _may_stay_sharded(analysis: Analysis, holders: _Holders, mark: Mark, dim: int) -> bool:
    """Return whether a dim that stays sharded after this mark reaches only outputs of the model."""
    tape = analysis.tape
    if dim != len(tape.tensors[mark.target].shape) - 1:
        return False
    reached, region = _region(analysis, holders, set(leaves(analysis.dims[mark.target][dim])))
    if any(tape.tensors[t].kind != "value" for t in region):
        return False  # for example, it is added to a replicated tensor
    marks = [e for e in tape.events if isinstance(e, Mark) and e is not mark and e.target in region]
    if any(e.source not in region for e in marks):
        return False  # it is added to a result of another module, which has a gather of its own
    contracted = {x for c in analysis.contractions for d in c.dims for x in leaves(d)}
    blocked = any(x.blocked for x in reached)
    replayed = any(set(r.outputs) & region for r in tape.replays)
    ports = {e.ports for e in tape.events if isinstance(e, Mark) and e.call == 0 and e.target in region}
    return not blocked and not replayed and not contracted & reached and ports == {("output.logits",)}


def _region(analysis: Analysis, holders: _Holders, reached: set[Node]) -> tuple[set[Node], set[int]]:
    """Return the leaves that these become behind marks, and all tensors that have one of them."""
    region = set().union(*(holders[leaf] for leaf in reached))
    for event in analysis.tape.events:
        if isinstance(event, Mark) and event.source in region and event.target not in region:
            for before, after in zip(analysis.dims[event.source], analysis.dims[event.target], strict=True):
                if not reached.isdisjoint(leaves(before)):
                    reached = reached | set(leaves(after))
                    region |= set().union(*(holders[leaf] for leaf in leaves(after)))
    return reached, region


def norm_plans(model: nn.Module, layouts: Layouts) -> dict[str, NormInfo] | Conflict:
    """Find formulas for the norms over a sharded dim, proven on numbers, by FQN.

    Args:
        model: the global model, on meta.

    Returns:
        A conflict if no formula of the runtime computes the same as a norm, or if the calls of a norm are
        not all on shards of the same dims, since it gets one formula for all of them.
    """
    first: dict[str, NormUse] = {}
    for use in layouts.analysis.norms:
        trees = [(u.groups, u.normalized) for u in (first.setdefault(use.site.fqn, use), use)]
        one, two = ([(_axes(n, layouts), _sizes(n, layouts)) for n in each] for each in trees)
        if one != two and any(axes for axes, _ in (*one, *two)):
            nodes = tuple(x for each in trees for n in each for x in leaves(n))
            where = f"the norm {use.site.fqn} is called on shards and on other tensors"
            return Conflict(nodes, where, use.site.fqn)
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
            return Conflict(nodes, f"the runtime has no formula for the norm {fqn} on shards")
        out[fqn] = replace(info, axes=axes, groups=_sizes(use.groups, layouts))
    return out


def _axes(node: Node, layouts: Layouts) -> tuple[int, ...]:
    return tuple(sorted({a for x in leaves(node) for a in layouts.assignment.axes(x)}))


def _sizes(node: Node, layouts: Layouts) -> tuple[int, ...]:
    """Return the local size of a dim: one if it is the same on all ranks, otherwise one for each."""
    mesh = layouts.mesh
    sizes = [local_size(layouts.dim(node), mesh, rank) for rank in range(math.prod(mesh))]
    return tuple(sizes) if len(set(sizes)) > 1 else (sizes[0],)


@dataclass
class _Entry:
    category: str = "boundary"
    inputs: list[ModuleStep] = field(default_factory=list)
    outputs: list[ModuleStep] = field(default_factory=list)
    overrides: list[AttributeOverride] = field(default_factory=list)
    norm: NormInfo | None = None
    flags: tuple[str, ...] = ()


@dataclass
class _Call:
    """The steps of one call of a module, and the dims of the tensors that they change."""

    inputs: list[ModuleStep] = field(default_factory=list)
    outputs: list[ModuleStep] = field(default_factory=list)
    from_end: list[ModuleStep] = field(default_factory=list)
    """Inputs, then outputs, with dims counted from the end and without sizes, to compare calls."""
    nodes: list[Node] = field(default_factory=list)

    def counted_from_end(self) -> _Call:
        """Return the same steps with dims that are right for tensors of any number of dims."""
        steps = [_at_dim(b, _dim(e)) for b, e in zip(self.inputs + self.outputs, self.from_end, strict=True)]
        return replace(self, inputs=steps[: len(self.inputs)], outputs=steps[len(self.inputs) :])


def module_plans(solution: Solution) -> tuple[ModulePlan, ...] | Conflict:
    """Return the plans of all modules that change; equal ones share an entry.

    Returns:
        A conflict if a module that is called more than once would need different steps each time.
    """
    entries: dict[str, _Entry] = {}
    for event in solution.analysis.tape.events:
        if isinstance(event, Op) and event.outputs and event.outputs[0] in solution.analysis.dims:
            category = _category(solution, event)
            if category:
                entries.setdefault(solution.fqn(event), _Entry()).category = category
    _collect_lookups(solution, entries)
    _collect_experts(solution, entries)
    conflict = _collect_steps(solution, entries)
    if conflict is not None:
        return conflict
    for (fqn, attribute), override in sorted(solution.overrides.items()):
        entries.setdefault(fqn, _Entry()).overrides.append(
            AttributeOverride(attribute, override.value, override.local)
        )
    for fqn, norm in solution.norms.items():
        entry = entries.setdefault(fqn, _Entry())
        entry.category, entry.norm = "norm", norm
    entries = {name: entry for fqn, entry in entries.items() for name in solution.folded.names(fqn)}
    order = {call.fqn: i for i, call in reversed(list(enumerate(solution.analysis.tape.calls)))}
    grouped: dict[tuple[str, ModulePlan], list[str]] = {}
    for fqn in sorted(entries, key=lambda f: order.get(f, -1)):
        grouped.setdefault((starred(fqn), _module_plan(entries[fqn])), []).append(fqn)
    return tuple(replace(plan, names=tuple(compress(names))) for (_, plan), names in grouped.items())


def _module_plan(entry: _Entry) -> ModulePlan:
    return ModulePlan(
        names=(),
        category=entry.category,
        inputs=tuple(entry.inputs),
        outputs=tuple(entry.outputs),
        overrides=tuple(entry.overrides),
        norm=entry.norm,
        flags=entry.flags,
    )


def _category(solution: Solution, op: Op) -> str:
    """Return the category of a module that contains this operator; empty if the operator does not decide
    it."""
    analysis = solution.analysis
    if not traits_of(op.name).is_product:
        return ""
    is_weight = [t in analysis.parametric or t in analysis.from_stack for t in op.inputs]
    weights = [t for t, w in zip(op.inputs, is_weight, strict=True) if w and len(analysis.dims[t]) > 1]
    if not any(solution.layouts.is_sharded(t) for t in weights):
        return ""
    if not analysis.from_stack.union(analysis.stacks).isdisjoint(weights):
        return "experts"
    state = analysis.partial[op.outputs[0]]
    return "row" if solution.layouts.assignment.partial_axes(state) else "column"


def _collect_lookups(solution: Solution, entries: dict[str, _Entry]) -> None:
    """Add local ids, and zeros for out-of-shard rows, to each module that looks up sharded rows."""
    analysis = solution.analysis
    for lookup in analysis.lookups:
        rows = solution.layouts.dim(analysis.dims[lookup.table][0])
        if axes_of(rows):
            entry = entries.setdefault(analysis.tape.calls[lookup.call].fqn, _Entry())
            if entry.category != "vocab" or not entry.inputs:
                entry.category = "vocab"
                entry.inputs.append(LocalRowsStep(lookup.port, rows, per_token=1))
                width = solution.per_token(lookup.output)
                entry.outputs.append(ZeroOutOfShardStep(lookup.output_port, per_token=width))


def _collect_experts(solution: Solution, entries: dict[str, _Entry]) -> None:
    """Add local ids, and weights of zero for out-of-shard experts, to each module with sharded experts."""
    for site, count in solution.analysis.experts:
        layout = solution.layouts.dim(count)
        entry = entries.get(site.where.fqn, _Entry())
        if axes_of(layout) and entry.category != "experts":
            entries[site.where.fqn] = entry
            entry.category, entry.flags = "experts", site.sharding.flags
            local_ids = LocalRowsOrEndStep if site.sharding.past_end else LocalRowsStep
            ids, weights = site.where.inputs[1:]
            entry.inputs += [
                local_ids(site.where.ids, layout, per_token=solution.per_token(ids)),
                ZeroOutOfShardStep(site.where.weights, per_token=solution.per_token(weights)),
            ]


def _collect_steps(solution: Solution, entries: dict[str, _Entry]) -> Conflict | None:
    """Add the steps of every module. Modules that are called several times have the same steps in all
    calls."""
    first: dict[str, _Call] = {}
    conflicts: dict[str, Conflict] = {}
    for call, call_steps in _calls(solution).items():
        fqn = solution.analysis.tape.calls[call].fqn
        first_steps = first.setdefault(fqn, call_steps)
        if first_steps.from_end != call_steps.from_end:
            nodes = [x for d in first_steps.nodes + call_steps.nodes for x in leaves(d)]
            where = f"{fqn} is called in different ways"
            conflicts.setdefault(fqn, Conflict(solution.sharded(nodes), where, fqn))
        elif list(map(_dim, first_steps.inputs + first_steps.outputs)) != list(
            map(_dim, call_steps.inputs + call_steps.outputs)
        ):
            first[fqn] = first_steps.counted_from_end()
    if conflicts:
        return joined(conflicts.values())
    for fqn, call_steps in first.items():
        if call_steps.from_end:
            entry = entries.setdefault(fqn, _Entry())
            entry.inputs[:0] = (
                call_steps.inputs
            )  # row ids become local, and weights zero, when they are complete
            entry.outputs.extend(call_steps.outputs)
    return None


def _calls(solution: Solution) -> dict[int, _Call]:
    """Return the steps of each module call, by its number on the tape."""
    dims = solution.analysis.dims
    out: dict[int, _Call] = {}
    for is_output in (False, True):
        for event in solution.analysis.tape.events:
            if not isinstance(event, Mark) or event.is_output != is_output:
                continue
            call = out.setdefault(event.call, _Call())
            steps, num_dims = steps_at(solution, event), len(dims[event.source])
            (call.outputs if is_output else call.inputs).extend(steps)
            call.from_end += [_at_dim(replace(b, per_token=0), _dim(b) - num_dims) for b in steps]
            if steps:
                call.nodes += dims[event.source] + dims[event.target]
    return out


def _dim(step: ModuleStep) -> int:
    """Return the tensor dim of a step, or 0 if it has none."""
    return step.dim if isinstance(step, ReshardingStep) else 0


def _at_dim(step: ModuleStep, dim: int) -> ModuleStep:
    return replace(step, dim=dim) if isinstance(step, ReshardingStep) else step
