"""The plan of a model for inference and plain training: solved until no obstacle is left."""

from __future__ import annotations

import sys
from dataclasses import replace
from textwrap import shorten

from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.fingerprint import code_info
from shardconv_runtime.format.plan import ModelInfo, Plan, TrainingPlan
from shardconv_runtime.parallel.meta_model import tied_names
from torch import nn

from ..planning.draws import draw_plans
from ..planning.fused_layers import fused_plans, without_groups
from ..planning.module_plans import logits_info, module_plans
from ..planning.obstacle import Obstacle
from ..planning.parameter_plans import find_divided_step, parameter_plans, split_at_steps
from ..planning.peer_layers import PeerLayers
from ..planning.solution import Solution
from ..solving.pins import Pins, pins_of
from ..solving.solve import Assignment, solve
from ..tracing.input_maker import EXTRA_OUTPUTS
from ..tracing.tape import Tape, draws, starred
from ..verifying.retracing.retrace import retrace
from .rounds import MAX_ROUNDS, PlanProblem, RuledOut, in_rounds

# What a reader of a plan should know and its tables do not show.


def plan_notes(solution: Solution) -> tuple[str, ...]:
    """Notes in the order of how much they matter."""
    analysis = solution.analysis
    return (
        *_opaque(analysis.tape),
        *(
            f"no rule for {name} (in {fqn}): all that it touches is replicated"
            for name, fqn in sorted(analysis.unknown.items())
        ),
        *(
            f"could not be localized; its inputs are replicated: {shorten(where, 160)}"
            for where in dict.fromkeys(map(starred, solution.ruled_out.values()))
        ),
        *_random_numbers(analysis.tape),
        *(f"guessed: {guess}" for guess in dict.fromkeys(analysis.tape.guesses)),
        *_replicated(solution.layouts.assignment),
    )


def _opaque(tape: Tape) -> list[str]:
    modules = {starred(fqn): why for (fqn, _), why in reversed(tape.opaque.items())}
    return [
        f"opaque: {name} could not be traced ({shorten(why, 120)}): it is replicated"
        for name, why in reversed(modules.items())
    ]


def _random_numbers(tape: Tape) -> list[str]:
    drawing = sorted({starred(tape.calls[op.call].fqn) for op in draws(tape)})
    names = ", ".join(name or "the model" for name in drawing)
    return [f"random numbers are drawn in {names}: seed all ranks alike"] if drawing else []


def _replicated(assignment: Assignment) -> list[str]:
    now, fewest = assignment.replicated
    if now >= fewest:
        return []
    return [
        f"with the fewest collectives, {fewest:.0%} of the matrices would be replicated; more collectives "
        f"were accepted, so that {now:.0%} are"
    ]


def plain_form(problem: PlanProblem) -> tuple[Plan, Solution]:
    """The plan without sequence parallelism, and the solution that it was made of.

    Raises:
        SolveError: obstacles are met in every round.
    """
    forbidden = problem.forbidden()
    forbidden += split_at_steps(problem.analysis, problem.folded, problem.steps)
    layers = PeerLayers(problem.analysis)
    pins = pins_of(problem.analysis, problem.given) if problem.given is not None else None

    def attempt(ruled_out: RuledOut) -> tuple[Plan, Solution] | Obstacle:
        result = _attempt(problem.with_calls_alike(ruled_out.alike), ruled_out, pins)
        return layers.widened(result) if isinstance(result, Obstacle) else result

    found, ruled_out = in_rounds(attempt, forbidden)
    if found is None:
        raise SolveError(
            f"no plan was found in {MAX_ROUNDS} rounds; the last obstacle: {ruled_out.last_reason()}"
        )
    return found


def _attempt(
    problem: PlanProblem, ruled_out: RuledOut, pins: Pins | None
) -> tuple[Plan, Solution] | Obstacle:
    assignment = solve(problem.analysis, problem.options.tp, ruled_out.nodes, problem.folded, pins)
    solution = problem.solution(assignment, ruled_out.reasons)
    if isinstance(solution, Obstacle):
        return solution
    plan = _assembled(problem, solution)
    if isinstance(plan, Obstacle):
        return plan
    obstacle = find_divided_step(solution, plan.parameters, problem.steps)
    if obstacle is None:
        if problem.expert_parallel:
            notes = (*plan.notes, *problem.expert_parallel.notes(solution.layouts))
            plan = replace(plan, experts="ep", notes=notes)
        fused = replace(plan, fused=fused_plans(plan, problem.model, solution.folded))
        found = _retraced(problem, fused, solution)
        return found if isinstance(found, Obstacle) else (found, solution)
    return obstacle


def _retraced(problem: PlanProblem, plan: Plan, solution: Solution) -> Plan | Obstacle:
    """The plan, with those groups of fused layers whose results the code can use: parts of larger tensors."""

    def obstacle_of(tried: Plan) -> Obstacle | None:
        return retrace(tried, solution.layouts, problem.model, problem.inputs, problem.bypassed)

    obstacle = obstacle_of(plan)
    if obstacle is not None and plan.fused:
        obstacle_unfused = obstacle_of(replace(plan, fused=()))
        if obstacle_unfused is not None:
            return obstacle_unfused
    while obstacle is not None and plan.fused:
        plan = without_groups(plan, obstacle.where.partition(" ")[0].rstrip(":"))
        obstacle = obstacle_of(plan)
    return obstacle or plan


def _assembled(problem: PlanProblem, solution: Solution) -> Plan | Obstacle:
    """The plan of a solution."""
    modules = module_plans(solution)
    if isinstance(modules, Obstacle):
        return modules
    model, options = problem.model, problem.inputs.options
    refusal = solution.gradients.refusal
    extra_outputs = tuple(name for name in EXTRA_OUTPUTS if options.get(name))
    training = TrainingPlan(draws=draw_plans(solution, model), extra_outputs=extra_outputs)
    return Plan(
        tp=problem.options.tp,
        mesh=solution.layouts.mesh,
        model=_model_info(problem),
        code=code_info(_code_modules(model, problem.analysis.tape)),
        parameters=parameter_plans(solution, model),
        modules=modules,
        tied=tuple(tied_names(model).items()),
        logits=logits_info(solution),
        training=None if refusal else training,
        inference_only=refusal,
        notes=plan_notes(solution),
    )


def _model_info(problem: PlanProblem) -> ModelInfo:
    return ModelInfo(
        class_name=problem.spec.class_name,
        dtype=problem.spec.dtype,
        num_parameters=sum(p.numel() for p in problem.model.parameters()),
        trust_remote_code=problem.spec.trust_remote_code,
    )


def _code_modules(model: nn.Module, tape: Tape) -> list[str]:
    """Python modules whose source the plan depends on: those of the model's classes and of its calls.

    Code of a model repository is copied beside the plan, and the manifest has its checksums.
    """
    names = set(tape.sources()) | {type(m).__module__ for m in model.modules()}
    left_out = ("torch.", "shardconv", "transformers_modules.", "__main__")
    return sorted(n for n in names if not n.startswith(left_out) and n in sys.modules)
