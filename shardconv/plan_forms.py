"""Solve a problem in rounds, and make the forms of a plan.

The forms are: plain, with activations sharded over the sequence, and cut into stages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import TypeVar

import torch
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import SolveError
from shardconv_runtime.files.fingerprint import code_info
from shardconv_runtime.format.pipeline_stages import StagesPlan
from shardconv_runtime.format.plan import ModelInfo, ParameterPlan, Plan, SequencePlan, TrainingPlan, by_name
from shardconv_runtime.format.plan import parameter_plans as entries_of
from shardconv_runtime.format.plan_json import of_sequence
from shardconv_runtime.meta.meta_model import tied_names
from shardconv_runtime.parallel.boundary import CACHE_ARGUMENTS, forward_signature
from shardconv_runtime.parallel.build import stored_tensors
from torch import nn
from transformers import DynamicCache

from .arguments import SolveOptions
from .dim_analysis.analysis import Analysis
from .dim_analysis.analyze import with_calls_alike
from .dim_analysis.dim_trees import Node, find, leaves
from .dim_analysis.rules import RULES
from .inputs.input_maker import EXTRA_OUTPUTS
from .inputs.trace_inputs import TraceInputs
from .planning.conflict import Conflict
from .planning.draw_plans import draw_plans
from .planning.expert_parallel import ExpertParallel
from .planning.fused_layers import PeerLayers, fused_plans, without_groups
from .planning.gradients import sequence_leaves, solve_gradients, solve_sequence
from .planning.hook_plans import hook_plans
from .planning.layout import Layouts
from .planning.localize import localize
from .planning.module_plans import logits_info, module_plans, norm_plans
from .planning.parameter_plans import (
    Grains,
    find_divided_grain,
    gradient_plans,
    parameter_plans,
    split_at_grains,
)
from .planning.solution import Solution
from .planning.solve import Assignment, Given, Pins, pins_of, solve
from .pp.capped_sizes import with_capped_sizes
from .pp.placeholder_forms import second_call
from .pp.stage_plans import StageOptions, stages_plan
from .simulation.layer_bypass import Bypass
from .tracing.fold import Folded
from .tracing.tape import Tape, draws, starred
from .tracing.trace import trace
from .verifying.retrace import retrace

# Solve a problem in rounds: each conflict rules out leaves, or different steps in calls of a module.


@dataclass(frozen=True)
class PlanProblem:
    """A model, its analysis, and the options of its plan. It is the same in every round."""

    spec: ModelSpec
    options: SolveOptions
    model: nn.Module
    """The unsharded model, on meta."""
    inputs: TraceInputs
    folded: Folded
    analysis: Analysis
    expert_parallel: ExpertParallel | None
    grains: Grains
    given: Given | None
    """Layouts of parameters that are fixed, since the model already has shards (for adapters)."""
    bypassed: Mapping[str, Bypass]
    """Layers that are represented by others, and how to bypass them."""

    def with_calls_alike(self, fqns: Collection[str]) -> PlanProblem:
        """Return the problem of a plan in which all calls of each of these modules have the same steps."""
        return replace(self, analysis=with_calls_alike(self.analysis, fqns)) if fqns else self

    def solution(self, assignment: Assignment, reasons: Mapping[Node, str]) -> Solution | Conflict:
        """Complete an assignment by everything that a plan contains."""
        layouts = Layouts(self.analysis, assignment)
        norms = norm_plans(self.model, layouts)
        if isinstance(norms, Conflict):
            return norms
        overrides = localize(layouts)
        if isinstance(overrides, Conflict):
            return overrides
        if self.expert_parallel:
            overrides |= self.expert_parallel.overrides(layouts)
        gradients = solve_gradients(self.analysis, assignment, self.folded)
        return Solution(layouts, overrides, norms, self.folded, reasons, gradients)

    def forbidden(self) -> list[Node]:
        """Return dims that no solution may shard."""
        return self.expert_parallel.forbidden() if self.expert_parallel else []


MAX_ROUNDS = 32

T = TypeVar("T")


@dataclass(frozen=True)
class RuledOut:
    """Constraints that earlier rounds put on the solution."""

    nodes: Sequence[Node]
    """Dims that must stay replicated."""
    reasons: Mapping[Node, str] = field(default_factory=dict)
    """Leaves that a conflict ruled out -> where the conflict was."""
    alike: frozenset[str] = frozenset()
    """Modules whose calls must get the same steps."""

    def and_also(self, conflict: Conflict) -> RuledOut:
        """Add the dims that caused a conflict, and the conflicts that were found with it."""
        nodes, reasons, alike = list(self.nodes), dict(self.reasons), set(self.alike)
        for each in (conflict, *conflict.others):
            if each.several_calls_of and each.several_calls_of not in alike:
                alike.add(each.several_calls_of)
            elif not each.nodes:
                raise SolveError(f"{each.where}: no attribute override makes this call local")
            else:
                nodes += each.nodes
                reasons |= {find(x): each.where for node in each.nodes for x in leaves(node)}
        return RuledOut(tuple(nodes), reasons, frozenset(alike))

    def last_reason(self) -> str:
        """Return where the last conflict was; empty if there was none."""
        return list(self.reasons.values())[-1] if self.reasons else ""


def in_rounds(
    attempt: Callable[[RuledOut], T | Conflict | None], forbidden: Sequence[Node]
) -> tuple[T | None, RuledOut]:
    """Call ``attempt``, and again with more ruled out after each conflict, until it returns no conflict.

    Returns:
        The result, and the dims that were ruled out. The result is None if ``MAX_ROUNDS`` were not enough.
    """
    ruled_out = RuledOut(forbidden)
    for _ in range(MAX_ROUNDS):
        result = attempt(ruled_out)
        if not isinstance(result, Conflict):
            return result, ruled_out
        ruled_out = ruled_out.and_also(result)
    return None, ruled_out


def without_extra_outputs(inputs: TraceInputs) -> TraceInputs:
    """Return the inputs of a call that does not collect outputs of layers, which no stage has all of."""
    options = {name: value for name, value in inputs.options.items() if name not in EXTRA_OUTPUTS}
    return replace(inputs, options=options)


class StagedForm:
    """A model to cut into stages, traced as stages run it."""

    def __init__(self, problem: PlanProblem, tape: Tape) -> None:
        self._problem = problem
        inputs = without_extra_outputs(problem.inputs)
        if inputs.options != problem.inputs.options:
            tape = trace(problem.model, inputs.tensors, RULES, inputs.options, few_chosen=inputs.few_chosen)
        # If the model makes no cache itself, it is traced with an empty one, as ``generate`` passes it.
        taken = forward_signature(problem.model).parameters
        name = next((name for name in CACHE_ARGUMENTS if name in taken), None)
        if not tape.given_caches and name is not None and "input_ids" in inputs.tensors:
            options = {**inputs.options, name: DynamicCache()}
            with suppress(SolveError):  # the model may need another kind of cache
                cached = trace(problem.model, inputs.tensors, RULES, options, few_chosen=inputs.few_chosen)
                tape = cached if cached.given_caches else tape
        self._tape, self._inputs = tape, inputs
        self._second = second_call(problem.model, inputs)

    def with_stages(self, plan: Plan, solution: Solution) -> Plan:
        """Add the stages that the options ask for to a plan."""
        return replace(plan, stages=self._stages(plan, solution))

    def with_sequence_stages(self, plan: Plan, solution: Solution) -> Plan:
        """Add the stages of its sequence-parallel form to a plan with stages."""
        assert plan.training is not None
        assert plan.training.sequence is not None
        sequence = replace(plan.training.sequence, stages=self._stages(plan, solution).modules)
        return replace(plan, training=replace(plan.training, sequence=sequence))

    def _stages(self, plan: Plan, solution: Solution) -> StagesPlan:
        problem = self._problem
        stages = stages_plan(
            StageOptions(problem.options.pp, problem.options.stages),
            self._tape,
            solution.layouts,
            solution.folded,
            stored_bytes(problem.model, plan),
            plan.tied,
            self._second,
        )
        return with_capped_sizes(stages, problem.model, self._inputs)


def stored_bytes(model: nn.Module, plan: Plan) -> dict[str, int]:
    """Return the global bytes of each parameter and persistent buffer, under the first of its names."""
    aliases = dict(plan.tied)
    return {name: tensor.nbytes for name, tensor in stored_tensors(model) if name not in aliases}


def plan_notes(solution: Solution) -> tuple[str, ...]:
    """Return notes for readers of the plan, the most important first."""
    analysis, tape = solution.analysis, solution.analysis.tape
    opaque = {
        starred(fqn): why for (fqn, _), why in reversed(tape.opaque.items())
    }  # the first reason of each
    notes = [
        f"opaque: {name} could not be traced ({shorten(why, 120)}): it is replicated"
        for name, why in reversed(opaque.items())
    ]
    notes += [
        f"no rule for {name} (in {fqn}): all that it touches is replicated"
        for name, fqn in sorted(analysis.unknown.items())
    ]
    notes += [
        f"could not be localized; its inputs are replicated: {shorten(where, 160)}"
        for where in dict.fromkeys(map(starred, solution.ruled_out.values()))
    ]
    drawing = sorted({starred(tape.calls[op.call].fqn) for op in draws(tape)})
    if drawing:
        names = ", ".join(name or "the model" for name in drawing)
        notes.append(f"random numbers are drawn in {names}: seed all ranks alike")
    notes += [f"guessed: {guess}" for guess in dict.fromkeys(tape.guesses)]
    now, fewest = solution.layouts.assignment.replicated
    if now < fewest:
        notes.append(
            f"with the fewest collectives, {fewest:.0%} of the matrices would be replicated; more "
            f"collectives were accepted, so that {now:.0%} are"
        )
    return tuple(notes)


def plain_form(problem: PlanProblem) -> tuple[Plan, Solution]:
    """Find the plan without sequence parallelism, and its solution."""
    forbidden = problem.forbidden()
    forbidden += split_at_grains(problem.analysis, problem.folded, problem.grains)
    layers = PeerLayers(problem.analysis)
    pins = pins_of(problem.analysis, problem.given) if problem.given is not None else None

    def attempt(ruled_out: RuledOut) -> tuple[Plan, Solution] | Conflict:
        result = _attempt(problem.with_calls_alike(ruled_out.alike), ruled_out, pins)
        return layers.widened(result) if isinstance(result, Conflict) else result

    form, ruled_out = in_rounds(attempt, forbidden)
    if form is None:
        raise SolveError(
            f"no plan was found in {MAX_ROUNDS} rounds; the last conflict: {ruled_out.last_reason()}"
        )
    return form


def _attempt(
    problem: PlanProblem, ruled_out: RuledOut, pins: Pins | None
) -> tuple[Plan, Solution] | Conflict:
    options = problem.options
    element_bytes = getattr(torch, problem.spec.dtype).itemsize
    assignment = solve(
        problem.analysis,
        options.tp,
        ruled_out.nodes,
        problem.folded,
        pins,
        options.links,
        element_bytes,
        fewest_collectives=options.fewest_collectives,
    )
    solution = problem.solution(assignment, ruled_out.reasons)
    if isinstance(solution, Conflict):
        return solution
    plan = _assembled(problem, solution)
    if isinstance(plan, Conflict):
        return plan
    conflict = find_divided_grain(solution, plan.parameters, problem.grains)
    if conflict is not None:
        return conflict
    if problem.expert_parallel:
        notes = (*plan.notes, *problem.expert_parallel.notes(solution.layouts))
        plan = replace(plan, experts="ep", notes=notes)
    fused = replace(plan, fused=fused_plans(plan, problem.model, solution.folded))
    refusal = _retraced(problem, fused, solution)
    return refusal if isinstance(refusal, Conflict) else (refusal, solution)


def _retraced(problem: PlanProblem, plan: Plan, solution: Solution) -> Plan | Conflict:
    """Return the plan with the groups of fused layers whose results the code can use as parts of larger
    tensors."""

    def conflict_of(tried: Plan) -> Conflict | None:
        return retrace(tried, solution.layouts, problem.model, problem.inputs, problem.bypassed)

    conflict = conflict_of(plan)
    if conflict is not None and plan.fused:
        conflict_unfused = conflict_of(replace(plan, fused=()))
        if conflict_unfused is not None:
            return conflict_unfused
    while conflict is not None and plan.fused:
        plan = without_groups(plan, conflict.where.partition(" ")[0].rstrip(":"))
        conflict = conflict_of(plan)
    return conflict or plan


def _assembled(problem: PlanProblem, solution: Solution) -> Plan | Conflict:
    """Return the plan of a solution."""
    modules = module_plans(solution)
    if isinstance(modules, Conflict):
        return modules
    model, options = problem.model, problem.inputs.options
    # The plan depends on the source of the model's classes and of the functions that it calls. Code of a
    # model repository is copied next to the plan, and the manifest has its checksums.
    sources = set(problem.analysis.tape.sources()) | {type(m).__module__ for m in model.modules()}
    left_out = ("torch.", "shardconv", "transformers_modules.", "__main__")
    code = sorted(n for n in sources if not n.startswith(left_out) and n in sys.modules)
    refusal = solution.gradients.refusal
    extra_outputs = tuple(name for name in EXTRA_OUTPUTS if options.get(name))
    training = TrainingPlan(draws=draw_plans(solution, model), extra_outputs=extra_outputs)
    return Plan(
        tp=problem.options.tp,
        mesh=solution.layouts.mesh,
        model=ModelInfo(
            class_name=problem.spec.class_name,
            dtype=problem.spec.dtype,
            num_parameters=sum(p.numel() for p in model.parameters()),
            trust_remote_code=problem.spec.trust_remote_code,
        ),
        code=code_info(code),
        parameters=parameter_plans(solution, model),
        modules=modules,
        tied=tuple(tied_names(model).items()),
        logits=logits_info(solution),
        training=None if refusal else training,
        inference_only=refusal,
        hooks=hook_plans(solution),
        notes=plan_notes(solution),
    )


def with_sequence_form(
    problem: PlanProblem, plan: Plan, plain: Solution, staged: StagedForm | None = None
) -> Plan:
    """Add the sequence-parallel form to a plan: the same shards, activations sharded over the sequence."""
    if plan.training is None:
        raise no_sequence_form(problem, f"the plan is for inference only: {plan.inference_only}")
    training = plan.training

    sequence = sequence_leaves(problem.analysis)
    if not sequence:
        raise no_sequence_form(problem, "it takes no token ids, or several at a position")

    def attempt(ruled_out: RuledOut) -> Plan | Conflict | None:
        outcome = _sequence_attempt(
            problem.with_calls_alike(ruled_out.alike), plan, training, plain, ruled_out, staged
        )
        if not isinstance(outcome, Conflict):
            return outcome
        if not outcome.nodes and not outcome.several_calls_of:
            raise no_sequence_form(problem, outcome.where)
        return _of_sequence_alone(outcome, sequence)

    form, ruled_out = in_rounds(attempt, problem.forbidden())
    if form is None:
        raise no_sequence_form(problem, ruled_out.last_reason() or "no activation would gain by it")
    return form


def no_sequence_form(problem: PlanProblem, why: str) -> SolveError:
    """Return the error of a model for which there is no sequence-parallel form."""
    return SolveError(
        f"{problem.spec.name}: its activations cannot be sharded over the sequence: {why}; convert without "
        "sequence parallelism"
    )


def _sequence_attempt(
    problem: PlanProblem,
    plan: Plan,
    training: TrainingPlan,
    plain: Solution,
    ruled_out: RuledOut,
    staged: StagedForm | None,
) -> Plan | Conflict | None:
    assignment = solve_sequence(problem.analysis, plain.layouts.assignment, problem.folded, ruled_out.nodes)
    if assignment is None:
        return None
    solution = problem.solution(assignment, ruled_out.reasons)
    if isinstance(solution, Conflict):
        return solution
    if solution.gradients.refusal:
        raise no_sequence_form(problem, solution.gradients.refusal)
    modules = module_plans(solution)
    if isinstance(modules, Conflict):
        return modules
    parameters = _stored_alike(problem, plan, parameter_plans(solution, problem.model))
    sequence = SequencePlan(
        modules,
        gradient_plans(parameters),
        draw_plans(solution, problem.model),
        hooks=hook_plans(solution),
    )
    plan = replace(plan, training=replace(training, sequence=sequence))
    if staged is not None:
        plan = staged.with_sequence_stages(plan, solution)
    layouts = solution.layouts, problem.model, problem.inputs, problem.bypassed
    return retrace(of_sequence(plan), *layouts) or plan


def _of_sequence_alone(conflict: Conflict, sequence: Collection[Node]) -> Conflict:
    """Blame a conflict only on the sequence, if this is among its dims. Other dims worked in the plain
    form."""
    blamed = [find(x) for node in conflict.nodes for x in leaves(node)]
    blamed_leaves = tuple(dict.fromkeys(x for x in blamed if x in sequence))
    nested = tuple(_of_sequence_alone(other, sequence) for other in conflict.others)
    return replace(conflict, nodes=blamed_leaves or conflict.nodes, others=nested)


def _stored_alike(
    problem: PlanProblem, plan: Plan, parameters: Sequence[ParameterPlan]
) -> list[ParameterPlan]:
    """Return the parameters of the sequence-parallel form, stored as in the plain form.

    A bias that is added before a reduction in the plain form may be added behind it here. Then it is not
    partial.
    """
    stored = entries_of(plan)
    unread = frozenset[str]() if problem.given is None else problem.given.unread
    out = []
    for name, entry in by_name("parameters", tuple(parameters)).items():
        first_entry = stored[name]
        if name in unread:
            entry = first_entry
        if entry.dims != first_entry.dims or not set(entry.partial) <= set(first_entry.partial):
            raise no_sequence_form(problem, f"{name} would have to be stored in another way")
        grad_axes = tuple(a for a in entry.grad_axes if a not in first_entry.partial)
        out.append(replace(entry, names=(name,), partial=first_entry.partial, grad_axes=grad_axes))
    return out
