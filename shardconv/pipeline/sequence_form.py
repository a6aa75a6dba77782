"""The sequence-parallel form of a plan: the same shards, with activations sharded over the sequence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.plan import ParameterPlan, Plan, SequencePlan, TrainingPlan, by_name
from shardconv_runtime.format.plan import parameter_plans as entries_of
from shardconv_runtime.format.plan_json import of_sequence

from ..dim_analysis.dim_trees import Node, find, leaves
from ..planning.draws import draw_plans
from ..planning.module_plans import module_plans
from ..planning.obstacle import Obstacle
from ..planning.parameter_plans import gradient_plans, parameter_plans
from ..planning.solution import Solution
from ..solving.sequence_dims import sequence_leaves, solve_sequence
from ..verifying.retracing.retrace import retrace
from .rounds import PlanProblem, RuledOut, in_rounds
from .staged_form import StagedForm


def with_sequence_form(
    problem: PlanProblem, plan: Plan, plain: Solution, staged: StagedForm | None = None
) -> Plan:
    """The plan with its sequence-parallel form.

    Args:
        problem: of the plan.
        plan: its plain form.
        plain: the solution that this was made of.
        staged: of a plan with stages.

    Raises:
        SolveError: there is no such form.
    """
    if plan.training is None:
        raise no_sequence_form(problem, f"the plan is for inference only: {plan.inference_only}")
    training = plan.training

    sequence = sequence_leaves(problem.analysis)
    if not sequence:
        raise no_sequence_form(problem, "it takes no token ids, or several at a position")

    def attempt(ruled_out: RuledOut) -> Plan | Obstacle | None:
        found = _attempt(problem.with_calls_alike(ruled_out.alike), plan, training, plain, ruled_out, staged)
        if not isinstance(found, Obstacle):
            return found
        if not found.nodes and not found.several_calls_of:
            raise no_sequence_form(problem, found.where)
        return _of_sequence_alone(found, sequence)

    found, ruled_out = in_rounds(attempt, problem.forbidden())
    if found is None:
        raise no_sequence_form(problem, ruled_out.last_reason() or "no activation would gain by it")
    return found


def no_sequence_form(problem: PlanProblem, why: str) -> SolveError:
    """The error of a model that was to have a sequence-parallel form."""
    return SolveError(
        f"{problem.spec.name}: its activations cannot be sharded over the sequence: {why}; convert without "
        "sequence parallelism"
    )


def _attempt(
    problem: PlanProblem,
    plan: Plan,
    training: TrainingPlan,
    plain: Solution,
    ruled_out: RuledOut,
    staged: StagedForm | None,
) -> Plan | Obstacle | None:
    assignment = solve_sequence(problem.analysis, plain.layouts.assignment, problem.folded, ruled_out.nodes)
    if assignment is None:
        return None
    solution = problem.solution(assignment, ruled_out.reasons)
    if isinstance(solution, Obstacle):
        return solution
    if solution.gradients.refusal:
        raise no_sequence_form(problem, solution.gradients.refusal)
    modules = module_plans(solution)
    if isinstance(modules, Obstacle):
        return modules
    parameters = _stored_alike(problem, plan, parameter_plans(solution, problem.model))
    sequence = SequencePlan(modules, gradient_plans(parameters), draw_plans(solution, problem.model))
    plan = replace(plan, training=replace(training, sequence=sequence))
    if staged is not None:
        plan = staged.with_sequence_stages(plan, solution)
    given = solution.layouts, problem.model, problem.inputs, problem.bypassed
    return retrace(of_sequence(plan), *given) or plan


def _of_sequence_alone(obstacle: Obstacle, sequence: Collection[Node]) -> Obstacle:
    """The obstacle, blamed on the sequence if that is among its dims; others were none in the plain form."""
    blamed = [find(x) for node in obstacle.nodes for x in leaves(node)]
    own = tuple(dict.fromkeys(x for x in blamed if x in sequence))
    others = tuple(_of_sequence_alone(other, sequence) for other in obstacle.others)
    return replace(obstacle, nodes=own or obstacle.nodes, others=others)


def _stored_alike(
    problem: PlanProblem, plan: Plan, parameters: Sequence[ParameterPlan]
) -> list[ParameterPlan]:
    """Parameters of the sequence-parallel form, which are stored as the plan says.

    A bias that is added before a reduction there may be added behind it here; then it is not partial.

    Raises:
        SolveError: one would have to be stored in another way.
    """
    stored = entries_of(plan)
    unread = frozenset[str]() if problem.given is None else problem.given.unread
    out = []
    for name, entry in by_name("parameters", tuple(parameters)).items():
        known = stored[name]
        if name in unread:
            entry = known
        if entry.dims != known.dims or not set(entry.partial) <= set(known.partial):
            raise no_sequence_form(problem, f"{name} would have to be stored in another way")
        grad_axes = tuple(a for a in entry.grad_axes if a not in known.partial)
        out.append(replace(entry, names=(name,), partial=known.partial, grad_axes=grad_axes))
    return out
