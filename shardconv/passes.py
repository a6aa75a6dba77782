"""Solve stage by stage: build, trace, fold, analyze, solve, check."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten

import torch
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.default_modes import in_one_thread
from shardconv_runtime.errors import ShardconvError, SolveError, SourceError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.plan_json import of_sequence
from shardconv_runtime.meta.meta_model import build_model
from torch import nn
from torch.distributions import Distribution, Normal

from .adapted_plan import Adaptation, AdaptedModel
from .arguments import ExampleInputs, SolveOptions
from .dim_analysis.analysis import Reader
from .dim_analysis.analyze import analyze, with_parts
from .dim_analysis.rules import RULES
from .inputs.example_inputs import NOT_IN_EXAMPLES, stored_example
from .inputs.smaller_configs import smaller_configs
from .inputs.trace_inputs import (
    TraceInputs,
    not_in_training,
    returns_its_loss_function,
    trace_inputs,
)
from .numeric_check import NumericCheck, Source, with_parallel_loss
from .plan_forms import (
    PlanProblem,
    StagedForm,
    no_sequence_form,
    plain_form,
    with_sequence_form,
    without_extra_outputs,
)
from .planning.expert_parallel import ExpertParallel, isolate_experts
from .planning.parameter_plans import Grains
from .planning.solution import stand_in
from .simulation.layer_bypass import Bypass, bypassed_copy, working_bypasses
from .simulation.memory_measurement import NotMeasured, measure_memory
from .tracing.fold import Folded, fold
from .tracing.tape import Tape
from .training_code import TrainingCode, training_code
from .verifying.shrink import is_same_code, resized_tensors
from .verifying.small_model import FullModel

Tell = Callable[[str], None]

Inspect = Callable[[Plan, nn.Module, TraceInputs, Mapping[str, Bypass]], None]
"""Looks at a plan, its unsharded model on meta, the inputs of its trace, and layers that others represent."""


def solve_plan(
    spec: ModelSpec,
    options: SolveOptions,
    *,
    grains: Grains | None = None,
    progress: Tell | None = None,
    adaptation: Adaptation | None = None,
    inspect: Inspect | None = None,
    built: nn.Module | None = None,
) -> Plan:
    """Solve a model and return its plan. See ``ModelSolver``."""
    solver = ModelSolver(spec, grains=grains, progress=progress, adaptation=adaptation, built=built)
    return solver.plan(options, inspect)


class ModelSolver:
    """The plans of one model for several options; it is traced once for those with the same trace.

    Args:
        spec: the model.
        grains: units in which its weights can be divided.
        progress: is told of each pass.
        adaptation: the adapter of the model.
        built: the model on meta, as ``build_model`` returns it, if the caller has it and does not need it any
            more.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        grains: Grains | None = None,
        progress: Tell | None = None,
        adaptation: Adaptation | None = None,
        built: nn.Module | None = None,
    ) -> None:
        self.spec = spec
        self.grains = grains or {}
        self.tell = progress or (lambda _: None)
        self.adaptation = adaptation
        self._built = built
        self._runs: dict[_TraceOptions, _Run] = {}

    def plan(self, options: SolveOptions, inspect: Inspect | None = None) -> Plan:
        """Solve the model and return its plan.

        Args:
            options: the options that it is solved for.
            inspect: is called with the plan and the traced model, once the plan is complete.
        """
        spec = self.spec
        try:
            # The models are small, and each simulated rank is a thread with its own pool, whose threads spin
            # while they wait. On two cores they double the CPU time.
            with _no_collection(), _without_validation(), _without_fast_paths(), in_one_thread():
                return self._solved(options, inspect)
        except ShardconvError:
            raise
        except MemoryError as error:
            raise SolveError(
                f"{spec.name}: memory ran out while its plan was made or proven on numbers; do it where more "
                f"is free, or leave the numbers out with --no-check. What failed: {error}"
            ) from error
        except Exception as error:
            raise SolveError(
                f"{spec.name}: no plan could be made ({type(error).__name__}: {error}); this is a gap in "
                "shardconv, please report it with the model's config.json"
            ) from error

    def _solved(self, options: SolveOptions, inspect: Inspect | None) -> Plan:
        spec, tell = self.spec, self.tell
        traced_with = _TraceOptions.of(options)
        if traced_with not in self._runs:
            self._runs[traced_with] = _traced(spec, options, self.adaptation, tell, self._built)
            self._built = None
        run = self._runs[traced_with]
        _require_dims(spec, run.model, options.tp)

        def with_fewer_positions() -> Source | None:
            tell("building the model for smaller images or sounds")
            return _with_fewer_positions(run, spec, options, self.adaptation)

        used = run if options.check else run.as_in_training()
        plan = _solved_run(spec, options, self.grains, used, tell, with_fewer_positions)
        plan = replace(plan, devices=options.devices)
        if inspect is not None:
            inputs = without_extra_outputs(run.inputs) if options.pp > 1 else run.inputs
            inspect(plan, run.model, inputs, run.bypasses)
        return plan


@dataclass(frozen=True, slots=True)
class _TraceOptions:
    """The options on which a trace depends."""

    sequence_parallel: bool
    multiple: int
    """The lengths of made-up inputs are multiples of it."""
    example: ExampleInputs | None

    @classmethod
    def of(cls, options: SolveOptions) -> _TraceOptions:
        multiple = options.tp if options.sequence_parallel else 1
        return cls(options.sequence_parallel, multiple, options.example)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector, since a tape is a million small objects that all stay.

    Simulations collect their own garbage, without the objects that are frozen by then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _validates() -> bool:
    """Return whether distributions check their arguments, which only shows when they do."""
    try:
        Normal(0.0, -1.0)
    except ValueError:
        return True
    return False


@contextmanager
def _without_validation() -> Iterator[None]:
    """Disable checks of arguments of distributions, which torch disables when it first compiles something.

    Attention may compile itself, and traces before and after would differ in the operators of these checks.
    """
    before = _validates()
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def _without_fast_paths() -> Iterator[None]:
    """Let torch's attention and encoder layers call their submodules, as on ranks, see ``parallel.build``."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _traced(
    spec: ModelSpec,
    options: SolveOptions,
    adaptation: Adaptation | None,
    tell: Tell,
    built: nn.Module | None = None,
) -> _Run:
    tell("building the model")
    try:
        if built is not None:
            model = built
        elif spec.twin is not None:
            model = copy.deepcopy(spec.twin)
        else:
            model = build_model(spec.model_class, spec.config, getattr(torch, spec.dtype), spec.tied)
    except ShardconvError:
        raise
    except Exception as error:
        raise SourceError(
            f"{spec.name}: {spec.model_class.__name__} cannot be built from its config: {error}; "
            "correct config.json"
        ) from error
    _ask_for_no_inner_states(model)
    adapted = adaptation.attached(model) if adaptation is not None else None
    _require_dims(spec, model, options.tp)
    tell("tracing")
    example = options.example or stored_example(spec.directory)
    multiple = _TraceOptions.of(options).multiple
    inputs, tape = trace_inputs(model, RULES, multiple=multiple, example=example)
    return _Run.of(model, inputs, tape, adapted, options.sequence_parallel)


def _require_dims(spec: ModelSpec, model: nn.Module, tp: int) -> None:
    """Refuse more ranks than the largest dim: some ranks would hold nothing of any matrix."""
    largest = max((max(p.shape) for p in model.parameters() if p.dim()), default=1)
    if tp > largest:
        raise SolveError(
            f"{spec.name} cannot be sharded over {tp} ranks: no dim of its parameters is larger than "
            f"{largest}; give a smaller tp"
        )


def _ask_for_no_inner_states(model: nn.Module) -> None:
    """Set the options of a model's configs for which it returns hidden states and attention weights to False.

    A plan is solved without them: a call on ranks may ask for them, and is refused if the plan divides them.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        for option in NOT_IN_EXAMPLES:
            if option.startswith("output_") and getattr(config, option, False):
                setattr(config, option, False)


def _with_fewer_positions(
    full: _Run, spec: ModelSpec, options: SolveOptions, adaptation: Adaptation | None
) -> Source | None:
    """Return the first model from a config with smaller sizes that has the same code, with its bypasses."""
    if spec.twin is not None:
        return None  # it is in memory, and has only its own sizes
    for config in smaller_configs(spec.config):
        try:
            run = _traced(replace(spec, config=config), options, adaptation, lambda what: None)
        except ShardconvError:
            continue  # its code does not run on such sizes
        resized = resized_tensors(full.model, run.model)
        if resized is not None and is_same_code(full.folded.tape, run.folded.tape):
            folded = run.folded
            analysis = with_parts(analyze(folded.tape, folded.ties, folded.same), run.model)
            return FullModel(run.model, run.inputs, folded, analysis, resized), run.bypasses
    return None


@dataclass(frozen=True)
class _Run:
    """A model that was traced."""

    model: nn.Module
    inputs: TraceInputs
    tape: Tape
    adapted: AdaptedModel | None
    """The model's adapter, and the plan of the model without it."""
    folded: Folded
    """The folded tape."""
    bypasses: Mapping[str, Bypass]
    """How to bypass the layers that are represented by others."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: TraceInputs,
        tape: Tape,
        adapted: AdaptedModel | None,
        first_apart: bool,
    ) -> _Run:
        """Fold a traced model. See ``fold`` for ``first_apart``."""
        folded = fold(tape, first_apart=first_apart)
        bypasses = working_bypasses(model, inputs, tape, folded.representatives())
        return cls(model, inputs, tape, adapted, folded, bypasses)

    def as_in_training(self) -> _Run:
        """Return the same model, with the modules that are not called in training."""
        shown_by = partial(stand_in, stand_ins=self.folded.representatives())
        model = bypassed_copy(self.model, self.bypasses)
        reason = not_in_training(self.tape, model, self.inputs, shown_by)
        short = replace(self.folded.tape, not_in_training=reason)
        tape = replace(self.tape, not_in_training=reason)
        return replace(self, tape=tape, folded=replace(self.folded, tape=short))


def _solved_run(
    spec: ModelSpec,
    options: SolveOptions,
    grains: Grains,
    run: _Run,
    tell: Tell,
    with_fewer_positions: Callable[[], Source | None],
) -> Plan:
    model, inputs, tape, adapted = run.model, run.inputs, run.tape, run.adapted
    given_layouts = adapted.given if adapted is not None else None
    tell("solving")
    traced = folded = run.folded
    if options.experts == "ep":
        tell("proving the experts")
        folded = isolate_experts(folded, model)
    analysis = with_parts(analyze(folded.tape, folded.ties, folded.same), model)
    training = TrainingCode()
    if adapted is None or not adapted.attached.not_trained:
        training = training_code(traced.tape, analysis, bypassed_copy(model, run.bypasses), inputs)
    in_training = dict.fromkeys(training.reads_whole, Reader.TRAINING)
    analysis = replace(analysis, read_elsewhere={**analysis.read_elsewhere, **in_training})
    experts = ExpertParallel(analysis) if options.experts == "ep" else None
    bypassed = run.bypasses
    problem = PlanProblem(
        spec, options, model, inputs, folded, analysis, experts, grains, given_layouts, bypassed
    )
    plan, solution = plain_form(problem)
    if adapted is not None:
        plan = adapted.planned(plan)
    notes = tuple(
        f"traced without {name} ({why}): a loaded model refuses it, and parameters that only it reaches are "
        "replicated"
        for name, why in inputs.left_out.items()
    )
    plan = replace(plan, left_out=tuple(inputs.left_out), notes=(*notes, *plan.notes))
    if plan.training is not None:
        plan = replace(plan, training=replace(plan.training, draws_on_host=training.draws_on_host))
    plan = with_parallel_loss(plan, model, inputs)
    if not options.check and plan.training is not None and plan.training.parallel_loss:
        is_known = returns_its_loss_function(bypassed_copy(model, bypassed), inputs)
        plan = replace(plan, training=replace(plan.training, parallel_loss=is_known))
    staged: StagedForm | None = None
    if options.pp > 1:
        tell("cutting the model into stages")
        staged = StagedForm(problem, tape)
        plan = staged.with_stages(plan, solution)
    if options.measure:
        tell("measuring caches and activations")
        plan = _with_memory(plan, model, inputs, bypassed)
    check = None
    if options.check:
        inside = analysis if folded is traced else analyze(traced.tape, traced.ties, traced.same)
        full = FullModel(model, inputs, traced, inside)
        gc.freeze()
        check = NumericCheck(
            full,
            bypassed,
            lambda what: tell(f"simulating the ranks: {what}"),
            with_fewer_positions,
            adapted.with_copied_modules if adapted is not None else lambda plan: plan,
        )
        plan = check.checked(plan)
        if plan.inference_only and not tape.not_in_training:
            other = run.as_in_training()
            if other.tape.not_in_training:
                return _solved_run(spec, options, grains, other, tell, with_fewer_positions)
        if plan.stages is not None:
            plan = check.with_right_stages(plan)
        if adapted is not None:
            check.require_right_when_disabled(plan)
    if options.sequence_parallel:
        tell("solving for sequence parallelism")
        plan = with_sequence_form(problem, plan, solution, staged)
        if check is not None:
            if wrong := check.wrong_sequence_form(plan) or check.wrong_sequence_stages(plan):
                raise no_sequence_form(problem, wrong)
            plan = check.with_padding(plan)
            if adapted is not None:
                check.require_right_when_disabled(of_sequence(plan))
    return plan if adapted is None else adapted.stored(plan)


def _with_memory(plan: Plan, model: nn.Module, inputs: TraceInputs, bypassed: Mapping[str, Bypass]) -> Plan:
    """Add the memory of caches and activations to the plan, if it can be measured."""
    plain = replace(plan, fused=())  # large inputs are not fused at run time
    try:
        if plan.stages is None:
            return replace(plan, memory=measure_memory(plain, model, inputs, bypassed))
        inputs, stages = without_extra_outputs(inputs), range(plan.stages.count)
        memory = tuple(measure_memory(plain, model, inputs, bypassed, stage) for stage in stages)
        return replace(plan, stages=replace(plan.stages, memory=memory))
    except NotMeasured as error:
        note = f"the memory of caches and activations could not be measured: {shorten(str(error), 200)}"
        return replace(plan, notes=(*plan.notes, note))
