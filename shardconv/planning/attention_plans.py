"""Find where the attention weights that a call may ask for are gathered.

The weights have a dim of heads, which a plan shards. A plan is traced and solved for a call that returns
none, often with a kernel that makes none. So the model is traced once more, with eager attention and with the
weights among its outputs, and solved with the layouts that the plan has. Its steps must be the plan's; then
the weights have the layout that the solution says. The gradients that go through the gathers are proven on
numbers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.module_steps import (
    AllGatherStep,
    GradDivideStep,
    LocalRowsOrEndStep,
    LocalRowsStep,
    ModuleStep,
    SliceStep,
    ZeroOutOfShardStep,
)
from shardconv_runtime.format.plan import ModulePlan, Plan, module_plans, parameter_plans
from shardconv_runtime.parallel.attention_weights import ASK
from shardconv_runtime.parallel.boundary import forward_signature
from torch import nn
from transformers import PreTrainedModel

from ..dim_analysis.analyze import analyze, with_parts
from ..dim_analysis.dim_trees import leaves
from ..dim_analysis.rules import RULES
from ..inputs.trace_inputs import TraceInputs
from ..tracing.fold import fold
from ..tracing.tape import Mark, Tape
from ..tracing.trace import trace
from .gradients import solve_gradients
from .layout import Layouts
from .module_plans import steps_at
from .solution import Solution, without_gradients
from .solve import Given, pins_of, solve

Gathers = Mapping[str, tuple[AllGatherStep | GradDivideStep, ...]]
"""Module -> the steps on the attention weights that it returns: gathers, or where all ranks have them, steps
to gradients that are terms of a sum."""


def asking(inputs: TraceInputs) -> TraceInputs:
    """Return the inputs of a call that asks for attention weights."""
    return replace(inputs, options={**inputs.options, ASK: True})


def returning_attentions(model: nn.Module) -> nn.Module | None:
    """Return a copy of a model that returns attention weights, as all models in it do; None if it cannot."""
    parameters = forward_signature(model).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not hasattr(getattr(model, "config", None), ASK) or not (takes_any or ASK in parameters):
        return None
    other = copy.deepcopy(model)
    setter = getattr(other, "set_attn_implementation", None)
    if setter is None:
        return None
    try:
        setter("eager")
        for part in _models(other).values():
            part.config._attn_implementation = "eager"  # the method leaves it for older code, which reads it
            part.config.output_attentions = True
    except (ValueError, NotImplementedError, ImportError):
        return None  # the model does not offer it
    return other


def _models(model: nn.Module) -> dict[str, Any]:
    """Return the models of transformers in a model by FQN: users may call each of them."""
    return {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}


def attention_gathers(model: nn.Module, inputs: TraceInputs, plan: Plan) -> Gathers | None:
    """Return the gathers of attention weights of a model with a plan.

    Args:
        model: the global model, on meta.

    Returns:
        None if the model returns none, does not run when it is asked for them, or needs other steps than the
        plan's.
    """
    returning = returning_attentions(model)
    if returning is None:
        return None
    modules = module_plans(plan)
    try:
        plain, parts = _trace(_not_returning(returning), inputs), _models(returning)
        folded = fold(_trace(returning, asking(inputs)))
        analysis = with_parts(analyze(folded.tape, folded.ties, folded.same), returning)
        usual = {(fqn, mark.ports) for fqn, mark in _returned(plain, parts)}
        returned = [mark for fqn, mark in _returned(folded.tape, parts) if (fqn, mark.ports) not in usual]
        sources = _sources(folded.tape, returned)
        free = {tid for source in sources for tid in source.passed}
        # Nothing is gathered for the weights alone, so that the rest is solved as without them.
        analysis = replace(
            analysis,
            tape=replace(
                analysis.tape, outputs=tuple(tid for tid in analysis.tape.outputs if tid not in free)
            ),
            read_elsewhere={t: reader for t, reader in analysis.read_elsewhere.items() if t not in free},
        )
        pins = pins_of(analysis, Given(plan.mesh, parameter_plans(plan)))
        # What the plan gathers is replicated from there on: it may have been ruled out to compute on shards.
        gathered = [
            leaf
            for event in folded.tape.events
            if isinstance(event, Mark) and event.target in analysis.dims
            for steps in [_planned(modules.get(folded.tape.calls[event.call].fqn), event)]
            for step in steps
            if isinstance(step, AllGatherStep) and not any(isinstance(other, SliceStep) for other in steps)
            for leaf in leaves(analysis.dims[event.target][step.dim])
        ]
        assignment = solve(analysis, plan.tp, gathered, folded, pins)
    except SolveError:
        return None
    if assignment.mesh != plan.mesh:
        return None
    layouts = Layouts(analysis, assignment)
    of_parameters = {name: entry.grad_axes for name, entry in parameter_plans(plan).items()}
    gradients = solve_gradients(analysis, assignment, folded, of_parameters)
    solution = Solution(layouts, {}, {}, folded, {}, gradients)
    for event in folded.tape.events:
        if isinstance(event, Mark):
            planned = _planned(modules.get(solution.fqn(event)), event)
            if _compared(steps_at(solution, event)) != planned:
                return None
    gathers: dict[str, dict[str, AllGatherStep | GradDivideStep]] = {}
    for mark in (source.mark for source in sources):
        sharded = [
            (i, d) for i, d in enumerate(map(layouts.open_dim, analysis.dims[mark.target])) if axes_of(d)
        ]
        # What a caller computes with the weights gives all ranks the same gradient.
        grad_axes = solution.gradients.axes(mark.target)
        if not sharded and not grad_axes:
            continue
        if (
            len(sharded) + bool(grad_axes) > 1
            or not solution.fqn(mark)
            or assignment.partial_axes(analysis.partial[mark.target])
        ):
            return None
        for port in mark.ports:
            step = (
                AllGatherStep(port, *sharded[0], solution.per_token(mark.target))
                if sharded
                else GradDivideStep(port, grad_axes)
            )
            if gathers.setdefault(solution.fqn(mark), {}).setdefault(port, step) != step:
                return None
    return {n: tuple(steps.values()) for fqn, steps in gathers.items() for n in folded.names(fqn)}


def _trace(model: nn.Module, inputs: TraceInputs) -> Tape:
    return trace(model, inputs.tensors, RULES, inputs.options, few_chosen=inputs.few_chosen)


def _not_returning(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    for part in _models(other).values():
        part.config.output_attentions = False
    return other


def _returned(tape: Tape, parts: Collection[str]) -> list[tuple[str, Mark]]:
    """Return the marks of the tensors that models return, with the FQNs of the models."""
    marks = [(tape.calls[e.call].fqn, e) for e in tape.events if isinstance(e, Mark) and e.is_output]
    return [(fqn, mark) for fqn, mark in marks if fqn in parts]


@dataclass(frozen=True)
class _Source:
    """Where a returned tensor comes from."""

    mark: Mark
    """The innermost output of a module from which on only the caller reads it."""
    passed: tuple[int, ...]
    """The tensor at all marks from there on."""


def _sources(tape: Tape, returned: Iterable[Mark]) -> list[_Source]:
    marks = {event.target: event for event in tape.events if isinstance(event, Mark)}
    # A module inside, such as a dropout, may return what the code around it still computes with.
    computed_with = {tid for event in tape.events if not isinstance(event, Mark) for tid in event.inputs}
    sources = []
    for mark in returned:
        passed = [mark.target]
        while mark.source in marks and mark.source not in computed_with:
            mark = marks[mark.source]
            passed.append(mark.target)
        sources.append(_Source(mark, (*passed, mark.source)))
    return sources


def _planned(entry: ModulePlan | None, mark: Mark) -> list[ModuleStep]:
    """Return the steps of a plan at a mark to compare; local rows and zeros do not come from marks."""
    if entry is None:
        return []
    steps = entry.outputs if mark.is_output else entry.inputs
    return _compared(s for s in steps if s.port in mark.ports and not isinstance(s, _OF_TABLES))


def _compared(steps: Iterable[ModuleStep]) -> list[ModuleStep]:
    """Return the steps as for inference, and without the numbers for reports."""
    return [replace(step, per_token=0) for step in without_gradients(list(steps))]


_OF_TABLES = (LocalRowsStep, LocalRowsOrEndStep, ZeroOutOfShardStep)
