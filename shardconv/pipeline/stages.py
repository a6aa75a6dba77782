"""Solving, stage by stage: build, trace, fold, analyse, solve, localise, annotate, check."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from textwrap import shorten

import torch
from shardconv_runtime.checkpoint.model_spec import ModelSpec
from shardconv_runtime.errors import ShardconvError, SolveError, SourceError
from shardconv_runtime.format.fingerprint import code_info
from shardconv_runtime.format.plan import (
    ModelInfo,
    NormInfo,
    ParameterPlan,
    Plan,
    SequencePlan,
    TrainingPlan,
    by_name,
    parameter_plans,
)
from shardconv_runtime.format.plan_forms import INFERENCE_ONLY, of_sequence
from shardconv_runtime.format.slices import local_size
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.parallel.meta_model import build_model
from shardconv_runtime.training.loss import has_parallel_loss
from torch import nn

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.analyze import analyse
from ..dim_analysis.dim_trees import Node, find, leaves
from ..dim_analysis.rules import RULES
from ..matching.norm_formulas import fit_norm
from ..planning import annotate
from ..planning.annotate import Solution
from ..planning.draws import draw_plans
from ..planning.expert_parallel import ExpertParallel, isolate_experts
from ..planning.inference_only import inference_only
from ..planning.layout import Layouts
from ..planning.localize import Unlocalizable, localize
from ..planning.whole_blocks import Blocks, require_whole_blocks, split_at_blocks
from ..solving.gradients import solve_gradients
from ..solving.sequence_dims import solve_sequence
from ..solving.solve import Assignment, solve
from ..tracing.fold import Folded, fold
from ..tracing.inputs import EXTRA_OUTPUTS, TraceInputs, trace_inputs
from ..tracing.tape import Tape, draws, starred
from ..verifying.plans.implementations import notes_on_others
from ..verifying.plans.retrace import retrace
from ..verifying.plans.simulate import may_be_padded, simulate
from ..verifying.simulation.shallow import Bypass, find_bypasses

MAX_ROUNDS = 32


def solve_plan(
    spec: ModelSpec,
    tp: int,
    *,
    experts: str = "tp",
    sequence_parallel: bool = False,
    blocks: Blocks | None = None,
    check: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan of a model for ``tp`` ranks.

    Args:
        spec: the resolved model; only its config is used.
        tp: number of ranks.
        experts: ``tp`` splits each expert of a mixture, ``ep`` gives whole experts to each rank.
        sequence_parallel: solve for activations that are split over the sequence, as well.
        blocks: of block-scaled parameters; no rank's part of them begins or ends inside of a block.
        check: compare simulated ranks with the unsharded model.
        progress: told the name of each stage.

    Raises:
        SolveError: the model cannot be traced, or its plan failed the check.
    """
    tell = progress or (lambda _: None)
    try:
        with _no_collection():
            return _stages(spec, tp, experts, sequence_parallel, blocks or {}, check, tell)
    except ShardconvError:
        raise
    except Exception as error:
        raise SolveError(
            f"{spec.name}: no plan could be made ({type(error).__name__}: {error}); this is a gap in "
            "shardconv, please report it with the model's config.json"
        ) from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the cyclic garbage collector: a tape is a million small objects that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _stages(
    spec: ModelSpec,
    tp: int,
    experts: str,
    sequence_parallel: bool,
    blocks: Blocks,
    check: bool,
    tell: Callable[[str], None],
) -> Plan:
    tell("building the model")
    model = _built(spec)
    tell("tracing")
    inputs, tape = trace_inputs(model, RULES)
    tell("solving")
    folded = fold(tape, first_apart=sequence_parallel)
    if experts == "ep":
        tell("proving the experts")
        folded = isolate_experts(folded, model)
    analysis = analyse(folded.tape, folded.ties)
    parallel = ExpertParallel(analysis) if experts == "ep" else None
    problem = _Problem(spec, tp, model, folded, analysis, parallel, blocks, inputs)
    plan, solution = _solved(problem)
    plan = replace(plan, notes=(*inputs.notes, *plan.notes))
    if plan.training is not None and _may_split_loss(plan, model, inputs):
        plan = replace(plan, training=replace(plan.training, parallel_loss=True))
    bypassed = find_bypasses(tape, folded.representatives()) if check else {}
    if check:
        tell("simulating the ranks")
        plan = _simulated(plan, model, inputs, bypassed, tell)
    if sequence_parallel:
        tell("solving for sequence parallelism")
        plan = _with_sequence(problem, plan, solution.layouts.assignment)
        outcome = simulate(of_sequence(plan), model, inputs, bypassed, gradients=True) if check else None
        if outcome is not None and outcome.gradients:
            raise _no_sequence(problem, outcome.gradients)
        if check and may_be_padded(plan, model, inputs, bypassed):
            plan = _padded(plan)
    return plan


def _padded(plan: Plan) -> Plan:
    """The plan, of which the sequence-parallel form may pad."""
    assert plan.training is not None
    assert plan.training.sequence is not None
    sequence = replace(plan.training.sequence, may_pad=True)
    return replace(plan, training=replace(plan.training, sequence=sequence))


def _simulated(
    plan: Plan,
    model: nn.Module,
    inputs: TraceInputs,
    bypassed: Mapping[str, Bypass],
    tell: Callable[[str], None],
) -> Plan:
    """The plan, proven on numbers; without gradients if these are not those of the unsharded model."""
    if plan.training is not None and plan.training.parallel_loss:
        try:
            labelled = simulate(plan, model, inputs.with_labels(), bypassed, gradients=True)
            is_right = labelled is None or not labelled.gradients
        except ShardconvError:
            is_right = False  # the loss needs whole logits, or the model cannot compute one
        plan = replace(plan, training=replace(plan.training, parallel_loss=is_right))
    outcome = simulate(plan, model, inputs, bypassed, gradients=plan.training is not None)
    if outcome is None:
        tell("too large to simulate in the free memory: shapes and positions were checked, not numbers")
        return plan
    if outcome.gradients:
        plan = inference_only(plan, outcome.gradients)
    if plan.tp > 1:
        plan = replace(plan, notes=(*plan.notes, *notes_on_others(plan, model, inputs, bypassed)))
    return plan


def _may_split_loss(plan: Plan, model: nn.Module, inputs: TraceInputs) -> bool:
    """Whether the model's loss may be one that shards of the logits suffice for; numbers prove it."""
    takes_labels = "labels" in forward_signature(model).parameters and hasattr(model, "loss_function")
    one_sequence = "input_ids" in inputs.tensors and "decoder_input_ids" not in inputs.tensors
    return (
        plan.training is not None
        and plan.logits is not None
        and plan.tp > 1
        and takes_labels
        and one_sequence
        and has_parallel_loss(getattr(model, "loss_type", None))
    )


def _built(spec: ModelSpec) -> nn.Module:
    try:
        return build_model(spec.model_class, spec.config, getattr(torch, spec.dtype))
    except ShardconvError:
        raise
    except Exception as error:
        raise SourceError(
            f"{spec.name}: {spec.model_class.__name__} cannot be built from its config: {error}; "
            "correct config.json"
        ) from error


@dataclass(frozen=True)
class _Problem:
    """What is solved: the same in every round."""

    spec: ModelSpec
    tp: int
    model: nn.Module
    folded: Folded
    analysis: Analysis
    parallel: ExpertParallel | None
    blocks: Blocks
    inputs: TraceInputs

    def solution(self, assignment: Assignment, ruled_out: Mapping[int, str]) -> Solution:
        """The assignment with all that a plan says.

        Raises:
            Unlocalizable: it is not possible.
        """
        layouts = Layouts(self.analysis, assignment)
        norms = _norms(self.model, layouts)
        edits = localize(layouts) | (self.parallel.edits(layouts) if self.parallel else {})
        gradients = solve_gradients(self.analysis, assignment, self.folded)
        return Solution(layouts, edits, norms, self.folded, ruled_out, gradients)


def _solved(problem: _Problem) -> tuple[Plan, Solution]:
    """Solve, and again without what turns out not to be possible, until all fits."""
    parallel, analysis, folded = problem.parallel, problem.analysis, problem.folded
    ruled_out: dict[int, str] = {}
    forbidden: list[Node] = parallel.forbidden() if parallel else []
    forbidden += split_at_blocks(analysis, folded, problem.blocks)
    for _ in range(MAX_ROUNDS):
        try:
            solution = problem.solution(solve(analysis, problem.tp, forbidden, folded), ruled_out)
            plan = _plan(problem, solution)
            require_whole_blocks(solution, plan.parameters, problem.blocks)
            if parallel:
                notes = (*plan.notes, *parallel.notes(solution.layouts))
                plan = replace(plan, experts="ep", notes=notes)
            retrace(plan, solution.layouts, problem.model, problem.inputs)
            return plan, solution
        except Unlocalizable as obstacle:
            _rule_out(obstacle, forbidden, ruled_out)
    raise SolveError(
        f"no plan was found in {MAX_ROUNDS} rounds; the last obstacle: {list(ruled_out.values())[-1]}"
    )


def _rule_out(obstacle: Unlocalizable, forbidden: list[Node], ruled_out: dict[int, str]) -> None:
    if not obstacle.nodes:
        raise SolveError(f"{obstacle.where}: no attribute edit makes this call local") from None
    forbidden += obstacle.nodes
    ruled_out |= {id(find(x)): obstacle.where for node in obstacle.nodes for x in leaves(node)}


def _with_sequence(problem: _Problem, plan: Plan, plain: Assignment) -> Plan:
    """The plan with its sequence-parallel form.

    Raises:
        SolveError: there is none.
    """
    if plan.training is None:
        why = next(n for n in plan.notes if n.startswith(INFERENCE_ONLY))
        raise _no_sequence(problem, f"the plan is {why}")
    ruled_out: dict[int, str] = {}
    forbidden: list[Node] = problem.parallel.forbidden() if problem.parallel else []
    for _ in range(MAX_ROUNDS):
        assignment = solve_sequence(problem.analysis, plain, problem.folded, forbidden)
        if assignment is None:
            break
        try:
            solution = problem.solution(assignment, ruled_out)
            if solution.gradients.refusal:
                raise _no_sequence(problem, solution.gradients.refusal)
            modules = annotate.module_plans(solution)
            parameters = _stored_alike(problem, plan, annotate.parameter_plans(solution, problem.model))
            gradients = annotate.gradient_plans(parameters)
            dice = draw_plans(solution, problem.model)
            training = replace(plan.training, sequence=SequencePlan(modules, gradients, dice))
            plan = replace(plan, training=training)
            retrace(of_sequence(plan), solution.layouts, problem.model, problem.inputs)
            return plan
        except Unlocalizable as obstacle:
            _rule_out(obstacle, forbidden, ruled_out)
    obstacles = list(ruled_out.values())
    raise _no_sequence(problem, obstacles[-1] if obstacles else "no activation would gain by it")


def _stored_alike(problem: _Problem, plan: Plan, parameters: Sequence[ParameterPlan]) -> list[ParameterPlan]:
    """Parameters of the sequence-parallel form, which are stored as the plan says.

    A bias that is added before a reduction there may be added behind it here; it is not, then.

    Raises:
        SolveError: one would have to be stored in another way.
    """
    stored = parameter_plans(plan)
    out = []
    for name, entry in by_name("parameters", tuple(parameters)).items():
        known = stored[name]
        if entry.dims != known.dims or not set(entry.partial) <= set(known.partial):
            raise _no_sequence(problem, f"{name} would have to be stored in another way")
        grad_axes = tuple(a for a in entry.grad_axes if a not in known.partial)
        out.append(replace(entry, names=(name,), partial=known.partial, grad_axes=grad_axes))
    return out


def _no_sequence(problem: _Problem, why: str) -> SolveError:
    return SolveError(
        f"{problem.spec.name}: no activation can be split over the sequence: {why}; convert without "
        "sequence parallelism"
    )


def _norms(model: nn.Module, layouts: Layouts) -> dict[str, NormInfo]:
    """The norms over a sharded dim, proven."""
    out: dict[str, NormInfo] = {}
    for use in layouts.analysis.norms:
        axes = _axes(use.normalised, layouts)
        apart = use.site.groups > 1 and bool(_axes(use.groups, layouts))
        fqn = use.site.fqn
        if fqn in out or not (axes or apart):
            continue
        info = fit_norm(model.get_submodule(fqn), use.site, layouts.analysis.tape)
        if info is None:
            nodes = [*leaves(use.groups), *leaves(use.normalised)]
            raise Unlocalizable(nodes, f"{fqn} is no norm that the runtime can compute on parts")
        out[fqn] = replace(info, axes=axes, groups=_local_sizes(use.groups, layouts))
    return out


def _axes(node: Node, layouts: Layouts) -> tuple[int, ...]:
    return tuple(sorted({a for x in leaves(node) for a in layouts.assignment.axes(x)}))


def _local_sizes(node: Node, layouts: Layouts) -> tuple[int, ...]:
    """The local size of a dim: one if all ranks have the same, else one for each."""
    mesh = layouts.mesh
    sizes = [local_size(layouts.dim(node), mesh, rank) for rank in range(math.prod(mesh))]
    return tuple(sizes) if len(set(sizes)) > 1 else (sizes[0],)


def _plan(problem: _Problem, solution: Solution) -> Plan:
    spec, tp, model, inputs = problem.spec, problem.tp, problem.model, problem.inputs
    analysis = solution.analysis
    refusal = solution.gradients.refusal
    modules = annotate.module_plans(solution)
    extra_outputs = tuple(name for name in EXTRA_OUTPUTS if inputs.options.get(name))
    training = TrainingPlan(draws=draw_plans(solution, model), extra_outputs=extra_outputs)
    return Plan(
        tp=tp,
        mesh=solution.layouts.mesh,
        model=ModelInfo(
            class_name=spec.class_name,
            dtype=spec.dtype,
            num_parameters=sum(p.numel() for p in model.parameters()),
            trust_remote_code=spec.trust_remote_code,
        ),
        code=code_info(_code_modules(model, analysis.tape)),
        parameters=annotate.parameter_plans(solution, model),
        modules=modules,
        tied=annotate.tied_names(model),
        logits=annotate.logits_info(solution, modules),
        training=None if refusal else training,
        notes=(*([INFERENCE_ONLY + refusal] if refusal else ()), *_notes(solution)),
    )


def _code_modules(model: nn.Module, tape: Tape) -> list[str]:
    """Python modules whose source the plan depends on: those of the model's classes and of its calls.

    Code of a model repository is copied beside the plan, and the manifest has its checksums.
    """
    names = set(tape.sources()) | {type(m).__module__ for m in model.modules()}
    foreign = ("torch.", "shardconv", "transformers_modules.", "__main__")
    return sorted(n for n in names if not n.startswith(foreign) and n in sys.modules)


def _notes(solution: Solution) -> tuple[str, ...]:
    """What a reader of the plan should know that it does not show."""
    analysis, assignment = solution.analysis, solution.layouts.assignment
    unknown = [
        f"no rule for {name} (in {fqn}): all that it touches is replicated"
        for name, fqn in sorted(analysis.unknown.items())
    ]
    guesses = [f"guessed: {g}" for g in dict.fromkeys(analysis.tape.guesses)]
    opaque = {starred(fqn): why for (fqn, _), why in reversed(analysis.tape.opaque.items())}
    untraced = [
        f"opaque: {name} could not be traced ({shorten(why, 120)}): it is replicated"
        for name, why in reversed(opaque.items())
    ]
    stuck = [
        f"no attribute makes it local, what it uses is whole there: {shorten(where, 160)}"
        for where in dict.fromkeys(map(starred, solution.unlocalizable.values()))
    ]
    dice = sorted({starred(analysis.tape.calls[op.call].fqn) for op in draws(analysis.tape)})
    seeds = f"random numbers are drawn in {', '.join(n or 'the model' for n in dice)}: seed all ranks alike"
    now, fewest = assignment.replicated
    split = (
        f"with the fewest collectives, {fewest:.0%} of the matrices would be whole on every rank; more "
        f"collectives were accepted, so that {now:.0%} are"
    )
    return (
        *untraced,
        *unknown,
        *stuck,
        *([seeds] if dice else ()),
        *guesses,
        *([split] if now < fewest else ()),
    )
