"""Reads the solution back as what the plan says of each parameter and each module.

Every mark where a placement changes becomes a boundary step of its module. Modules are recognised by
what they compute: a product with a sharded parameter is column-parallel if its output is sharded, row-
parallel if its output is partial; a lookup in sharded rows is vocab-parallel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardconv_runtime.format.dims import Dim, Leaf, axes_of
from shardconv_runtime.format.names import compress, expand_all
from shardconv_runtime.format.plan import (
    Boundary,
    Edit,
    GradientPlan,
    LogitsInfo,
    ModulePlan,
    NormInfo,
    ParameterPlan,
)
from shardconv_runtime.parallel.build import stored_tensors
from torch import nn

from ..dim_analysis import dim_trees as axes
from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Node, find
from ..dim_analysis.rules import contraction
from ..solving.gradients import WHOLE, Gradients, placement
from ..tracing.fold import Folded, prefixes
from ..tracing.tape import Mark, Op, starred
from .layout import Layouts
from .localize import Attribute, AttributeEdit, Unlocalizable


@dataclass(frozen=True)
class Solution:
    """A solved and localised model, before it is written as a plan."""

    layouts: Layouts
    edits: Mapping[Attribute, AttributeEdit]
    norms: Mapping[str, NormInfo]
    """FQN of each norm over a sharded dim."""
    folded: Folded
    """The folded tape that was solved: which layers stand for which."""
    unlocalizable: Mapping[int, str]
    """``id`` of leaves that were ruled out -> the call that no edit makes right."""
    gradients: Gradients

    @property
    def analysis(self) -> Analysis:
        """Axes of the traced model."""
        return self.layouts.analysis


# Parameters ----------------------------------------------------------------------------------------


def parameter_plans(solution: Solution, model: nn.Module) -> tuple[ParameterPlan, ...]:
    """How every parameter and persistent buffer is laid out; alike ones share an entry."""
    by_name = {i.name: t for t, i in enumerate(solution.analysis.tape.tensors) if i.name}
    entries: dict[tuple[str, ParameterPlan], list[str]] = {}
    stand_ins = solution.folded.representatives()
    known: dict[str, ParameterPlan] = {}
    aliases = dict(tied_names(model))
    for name, tensor in stored_tensors(model):
        if name in aliases:
            continue
        shown = stand_in(name, stand_ins)
        entry = known.get(shown)
        if entry is None:
            entry = _parameter(solution, by_name.get(shown), tensor)
            entry = _row_bias(solution, model, shown, entry)
            if entry.grad_axes or entry.partial:
                owners = {n.rpartition(".")[0] for n in (shown, *(a for a in aliases if aliases[a] == shown))}
                entry = replace(entry, grad_levels=_levels(solution, by_name[shown], owners))
            known[shown] = entry
        entries.setdefault((starred(name), entry), []).append(name)
    return tuple(replace(entry, names=tuple(compress(names))) for (_, entry), names in entries.items())


def gradient_plans(parameters: Iterable[ParameterPlan]) -> tuple[GradientPlan, ...]:
    """What parameters' plans say of their gradients, where that is something; alike ones share an entry."""
    grouped: dict[tuple[str, tuple[int, ...], int], list[str]] = {}
    for entry in parameters:
        if entry.grad_axes:
            for name in expand_all(entry.names):
                grouped.setdefault((starred(name), entry.grad_axes, entry.grad_levels), []).append(name)
    return tuple(
        GradientPlan(tuple(compress(names)), grad_axes, levels)
        for (_, grad_axes, levels), names in grouped.items()
    )


def stand_in(name: str, stand_ins: Mapping[str, str]) -> str:
    """The parameter of a layer that was solved, for one of a layer like it."""
    layer = next((p for p in prefixes(name) if p in stand_ins), "")
    return stand_ins[layer] + name[len(layer) :] if layer else name


def tied_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(alias, first name) of parameters that are one tensor."""
    first: dict[int, str] = {}
    out = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            out.append((name, first[id(parameter)]))
        else:
            first[id(parameter)] = name
    return tuple(out)


def _parameter(solution: Solution, tid: int | None, tensor: Any) -> ParameterPlan:
    dtype = str(tensor.dtype).removeprefix("torch.")
    analysis = solution.analysis
    if tid is None or tid not in analysis.dims:
        dims: tuple[Dim, ...] = tuple(Leaf(n) for n in tensor.shape)
        return ParameterPlan((), dims, dtype, reason="the traced forward pass does not use it")
    dims = solution.layouts.dims(tid)
    partial = solution.layouts.assignment.partial_axes(analysis.partial[tid])
    sharded = any(axes_of(d) for d in dims)
    reason = "" if sharded or partial or not solution.layouts.mesh else _reason(solution, tid)
    return ParameterPlan((), dims, dtype, partial, reason, grad_axes=solution.gradients.axes(tid))


def _levels(solution: Solution, tid: int, owners: Collection[str]) -> int:
    """How many levels above a parameter's own module is the innermost one that runs wherever it is read.

    Args:
        solution: the solution.
        tid: the parameter.
        owners: the modules that have it, several if it is tied; each may read it.
    """
    tape = solution.analysis.tape
    own = tape.tensors[tid].name.split(".")[:-1]
    kept = len(own)
    for event in tape.events:
        if isinstance(event, Op) and tid in event.inputs:
            running = tape.calls[event.call].fqn
            if not any(prefix in owners for prefix in prefixes(running)):
                same = [a == b for a, b in zip(own, running.split("."), strict=False)]
                kept = min(kept, (*same, False).index(False))
    return len(own) - kept


def _row_bias(solution: Solution, model: nn.Module, name: str, entry: ParameterPlan) -> ParameterPlan:
    """The bias of a plain row-parallel layer that reduces is added after that, whole."""
    if not entry.partial:
        return entry
    fqn, _, attribute = name.rpartition(".")
    owner = model.get_submodule(fqn)
    if attribute != "bias" or type(owner) is not nn.Linear:
        return entry
    for event in solution.analysis.tape.events:
        if isinstance(event, Mark) and event.is_output and _fqn(solution, event) == fqn:
            last = solution.layouts.dims(event.target)[-1]
            if _reduced_axes(solution, event) == entry.partial and not axes_of(last):
                grad_axes = {*entry.grad_axes, *_bias_gradient(solution, event)}
                reason = "added once, after the reduction"
                return replace(entry, partial=(), reason=reason, grad_axes=tuple(sorted(grad_axes)))
            break
    return entry


def _bias_gradient(solution: Solution, mark: Mark) -> list[int]:
    """Mesh axes over which the gradient of what is added behind a reduction is Partial."""
    scattered = {a for d in solution.layouts.dims(mark.target) for a in axes_of(d)}
    partial = solution.gradients.axes(mark.target)
    return [a for a in _reduced_axes(solution, mark) if a in scattered or a in partial]


def _reason(solution: Solution, tid: int) -> str:
    """Why a parameter is whole on every rank."""
    leaves = [x for dim in solution.analysis.dims[tid] for x in axes.leaves(dim)]
    for leaf in (x for y in leaves for x in (y, *y.links)):
        if id(find(leaf)) in solution.unlocalizable:
            return f"no attribute edit makes it local: {solution.unlocalizable[id(find(leaf))]}"
    free = [x for x in leaves if not x.blocked]
    if not free:
        why = next((x.why for x in leaves if x.why), "")
        return why or "no dim of it can be split"
    if all(x.size < max(solution.layouts.mesh) for x in free):
        return "it has fewer positions than there are ranks"
    return "splitting it would cost more communication than it saves"


# Modules -------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    category: str = "boundary"
    inputs: list[Boundary] = field(default_factory=list)
    outputs: list[Boundary] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    norm: NormInfo | None = None
    flags: tuple[str, ...] = ()
    nodes: list[Node] = field(default_factory=list)


def module_plans(solution: Solution) -> tuple[ModulePlan, ...]:
    """Every module that is not left as it is; alike ones share an entry.

    Raises:
        Unlocalizable: a module that is called more than once would need different steps each time.
    """
    entries: dict[str, _Entry] = {}
    _collect_categories(solution, entries)
    _collect_steps(solution, entries)
    for (fqn, attribute), edit in sorted(solution.edits.items()):
        entries.setdefault(fqn, _Entry()).edits.append(Edit(attribute, edit.value, edit.local))
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
    reduces = any(b.op in ("all_reduce", "reduce_scatter") for b in entry.outputs)
    gathers = any(b.op == "all_gather" for b in entry.outputs)
    slices_input = any(b.op == "slice" for b in entry.inputs)
    return ModulePlan(
        names=(),
        category=entry.category,
        inputs=tuple(entry.inputs),
        outputs=tuple(entry.outputs),
        edits=tuple(entry.edits),
        gather_output=gathers and entry.category in ("column", "vocab"),
        input_is_parallel=entry.category == "row" and not slices_input,
        reduce_output=reduces and entry.category in ("row", "vocab", "experts"),
        norm=entry.norm,
        flags=entry.flags,
    )


def _collect_categories(solution: Solution, entries: dict[str, _Entry]) -> None:
    analysis, layouts = solution.analysis, solution.layouts
    for event in analysis.tape.events:
        if isinstance(event, Op) and event.outputs and event.outputs[0] in analysis.dims:
            category = _category(solution, event)
            if category:
                entries.setdefault(_fqn(solution, event), _Entry()).category = category
    for lookup in analysis.lookups:
        rows = layouts.dim(analysis.dims[lookup.table][0])
        if axes_of(rows):
            entry = entries.setdefault(analysis.tape.calls[lookup.call].fqn, _Entry())
            if entry.category != "vocab" or not entry.inputs:
                entry.category = "vocab"
                entry.inputs.append(Boundary(lookup.slot, "local_rows", layout=rows, per_token=1))
                width = _per_token(solution, lookup.output)
                entry.outputs.append(Boundary(lookup.output_slot, "zero_foreign", per_token=width))
    _collect_experts(solution, entries)


def _collect_experts(solution: Solution, entries: dict[str, _Entry]) -> None:
    """Of each module whose experts are split: local ids, and no weight for those of other ranks."""
    for site, count in solution.analysis.experts:
        layout = solution.layouts.dim(count)
        entry = entries.get(site.where.fqn, _Entry())
        if axes_of(layout) and entry.category != "experts":
            entries[site.where.fqn] = entry
            entry.category, entry.flags = "experts", site.split.flags
            op = "local_rows_or_end" if site.split.past_end else "local_rows"
            ids, weights = site.where.inputs[1:]
            entry.inputs += [
                Boundary(site.where.ids, op, layout=layout, per_token=_per_token(solution, ids)),
                Boundary(site.where.weights, "zero_foreign", per_token=_per_token(solution, weights)),
            ]


def _category(solution: Solution, op: Op) -> str:
    analysis = solution.analysis
    if op.name.rsplit(".", 1)[0] not in contraction.RULES:
        return ""
    is_weight = [t in analysis.parametric or t in analysis.from_stack for t in op.inputs]
    weights = [t for t, w in zip(op.inputs, is_weight, strict=True) if w and len(analysis.dims[t]) > 1]
    if not any(solution.layouts.is_sharded(t) for t in weights):
        return ""
    if any(len(analysis.dims[t]) > 2 or t in analysis.from_stack for t in weights):
        return "experts"
    state = analysis.partial[op.outputs[0]]
    return "row" if solution.layouts.assignment.partial_axes(state) else "column"


@dataclass
class _Call:
    """The steps of one call of a module, and the dims of the tensors that they change."""

    inputs: list[Boundary] = field(default_factory=list)
    outputs: list[Boundary] = field(default_factory=list)
    from_end: list[Boundary] = field(default_factory=list)
    """Inputs, then outputs; dims counted from the end, and no sizes: the same in calls of other shapes."""
    nodes: list[Node] = field(default_factory=list)

    def counted_from_end(self) -> _Call:
        """The same steps with dims that hold for tensors of any number of dims."""
        steps = [
            replace(b, dim=e.dim) for b, e in zip(self.inputs + self.outputs, self.from_end, strict=True)
        ]
        return replace(self, inputs=steps[: len(self.inputs)], outputs=steps[len(self.inputs) :])


def _collect_steps(solution: Solution, entries: dict[str, _Entry]) -> None:
    """The steps of every module; of one that is called several times, the same for all calls."""
    first: dict[str, _Call] = {}
    for call, found in _calls(solution).items():
        fqn = solution.analysis.tape.calls[call].fqn
        known = first.setdefault(fqn, found)
        if known.from_end != found.from_end:
            nodes = [x for d in known.nodes + found.nodes for x in axes.leaves(d)]
            raise Unlocalizable(_chosen(solution, nodes), f"{fqn} is called in different ways")
        if [b.dim for b in known.inputs + known.outputs] != [b.dim for b in found.inputs + found.outputs]:
            first[fqn] = known.counted_from_end()
    for fqn, found in first.items():
        if found.from_end:
            entry = entries.setdefault(fqn, _Entry())
            entry.inputs[:0] = found.inputs  # row ids become local, and weights zero, when they are complete
            entry.outputs.extend(found.outputs)


def _calls(solution: Solution) -> dict[int, _Call]:
    analysis = solution.analysis
    out: dict[int, _Call] = {}
    for is_output in (False, True):
        for event in analysis.tape.events:
            if not isinstance(event, Mark) or event.is_output != is_output:
                continue
            found = out.setdefault(event.call, _Call())
            steps, rank = _steps(solution, event), len(analysis.dims[event.source])
            (found.outputs if is_output else found.inputs).extend(steps)
            found.from_end += [
                replace(b, per_token=0, dim=None if b.dim is None else b.dim - rank) for b in steps
            ]
            if steps:
                found.nodes += analysis.dims[event.source] + analysis.dims[event.target]
    return out


def _chosen(solution: Solution, nodes: Iterable[Node]) -> list[Node]:
    return [x for x in dict.fromkeys(nodes) if solution.layouts.assignment.axes(x)]


def _reduced_axes(solution: Solution, mark: Mark) -> tuple[int, ...]:
    assignment, partial = solution.layouts.assignment, solution.analysis.partial
    after = assignment.partial_axes(partial[mark.target])
    return tuple(a for a in assignment.partial_axes(partial[mark.source]) if a not in after)


def _steps(solution: Solution, mark: Mark) -> list[Boundary]:
    """Reduce, then gather, then slice: what a mark does to its tensor."""
    analysis, layouts = solution.analysis, solution.layouts
    width = _per_token(solution, mark.source)
    out: list[Boundary] = []
    reduced = _reduced_axes(solution, mark)
    before_axes, after_axes = (solution.gradients.axes(t) for t in (mark.source, mark.target))
    pairs = [
        (i, layouts.open_dim(x), layouts.open_dim(y))
        for i, (x, y) in enumerate(zip(analysis.dims[mark.source], analysis.dims[mark.target], strict=True))
    ]
    changed = [(i, before, after) for i, before, after in pairs if before != after]
    gathered = [(i, before) for i, before, _ in changed if axes_of(before)]
    sliced = [(i, after) for i, _, after in changed if axes_of(after)]
    for slot in mark.slots:
        if reduced and not gathered and [axes_of(d) for _, d in sliced] == [frozenset(reduced)]:
            out.append(_step(slot, "reduce_scatter", *sliced[0], width))
        else:
            if reduced:
                grad_axes = _among(after_axes, reduced)
                out.append(Boundary(slot, "all_reduce", axes=reduced, per_token=width, grad_axes=grad_axes))
            whole = (*before_axes, *_among(after_axes, reduced))
            out += [_step(slot, "all_gather", *each, width, after_axes, before_axes) for each in gathered]
            out += [_step(slot, "slice", *each, width, whole, after_axes) for each in sliced]
        out += _gradient_steps(solution, mark, slot, width)
    return out


def _step(
    slot: str,
    op: str,
    dim: int,
    layout: Dim,
    per_token: int,
    grad_axes: Collection[int] = (),
    local_grad_axes: Collection[int] = (),
) -> Boundary:
    whole, local = (_among(each, axes_of(layout)) for each in (grad_axes, local_grad_axes))
    return Boundary(slot, op, (), dim, layout, per_token, whole, local)


def _among(some: Collection[int], others: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(set(some) & set(others)))


def _gradient_steps(solution: Solution, mark: Mark, slot: str, per_token: int) -> list[Boundary]:
    """Where a tensor stays whole, and its gradient is whole on one side and partial on the other."""
    before, after = (solution.gradients.axes(t) for t in (mark.source, mark.target))
    kept = [
        axis
        for axis in range(len(solution.layouts.mesh))
        if all(_placement(solution, t, axis) == WHOLE for t in (mark.source, mark.target))
    ]
    summed = _among([a for a in after if a not in before], kept)
    divided = _among([a for a in before if a not in after], kept)
    out = [Boundary(slot, "grad_all_reduce", axes=summed, per_token=per_token)] if summed else []
    return [*out, Boundary(slot, "grad_divide", axes=divided)] if divided else out


def _placement(solution: Solution, tid: int, axis: int) -> str:
    return placement(solution.analysis, solution.layouts.assignment, tid, axis)


def _per_token(solution: Solution, tid: int) -> int:
    return math.ceil(math.prod(solution.analysis.tape.tensors[tid].shape) / solution.layouts.num_tokens)


def _fqn(solution: Solution, event: Op | Mark) -> str:
    return solution.analysis.tape.calls[event.call].fqn


# Logits --------------------------------------------------------------------------------------------


def logits_info(solution: Solution, modules: Sequence[ModulePlan]) -> LogitsInfo | None:
    """The one gather at a module's output that nothing but the model's own output needs."""
    analysis = solution.analysis
    for event in reversed(analysis.tape.events):
        if not isinstance(event, Mark) or not event.is_output:
            continue
        gathered = [b for b in _steps(solution, event) if b.op == "all_gather"]
        if len(gathered) == 1 and _may_stay_sharded(solution, event, gathered[0]):
            return LogitsInfo(_fqn(solution, event), event.slots[0])
    return None


def _may_stay_sharded(solution: Solution, mark: Mark, gathered: Boundary) -> bool:
    """Whether the dim, if left sharded after this mark, reaches only outputs of the model."""
    analysis, tape = solution.analysis, solution.analysis.tape
    assert gathered.dim is not None
    leaves = {id(x): x for x in axes.leaves(analysis.dims[mark.target][gathered.dim])}
    if not _is_last_dim(tape.tensors[mark.target].shape, gathered.dim):
        return False
    region = {
        t for t, dims in analysis.dims.items() if any(id(x) in leaves for d in dims for x in axes.leaves(d))
    }
    for event in tape.events:
        if isinstance(event, Mark) and event.source in region and event.target not in region:
            for before, after in zip(analysis.dims[event.source], analysis.dims[event.target], strict=True):
                if any(id(x) in leaves for x in axes.leaves(before)):
                    leaves |= {id(x): x for x in axes.leaves(after)}
            region |= {
                t
                for t, dims in analysis.dims.items()
                if any(id(x) in leaves for d in dims for x in axes.leaves(d))
            }
    if any(tape.tensors[t].kind != "value" for t in region):
        return False  # what it is added to, say, is whole
    contracted = {id(x) for c in analysis.contractions for d in c.dims for x in axes.leaves(d)}
    blocked = any(x.blocked for x in leaves.values())
    replayed = any(set(r.outputs) & region for r in tape.replays)
    reached = {e.slots for e in tape.events if isinstance(e, Mark) and e.call == 0 and e.target in region}
    return not blocked and not replayed and not contracted & set(leaves) and reached == {("output.logits",)}


def _is_last_dim(shape: tuple[int, ...], dim: int) -> bool:
    return dim == len(shape) - 1
