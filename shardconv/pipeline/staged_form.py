"""The stages of a plan, cut from the tape of the model that was solved."""

from __future__ import annotations

from dataclasses import replace

from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.pipeline_stages import StagesPlan
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.parallel.build import stored_tensors
from torch import nn
from transformers import DynamicCache

from ..cutting.capped_sizes import with_capped_sizes
from ..cutting.second_call import second_call
from ..cutting.stage_plans import StageOptions, stages_plan
from ..dim_analysis.rules import RULES
from ..planning.solution import Solution
from ..tracing.input_maker import EXTRA_OUTPUTS
from ..tracing.inputs import TraceInputs
from ..tracing.tape import Tape
from ..tracing.trace import trace
from .rounds import PlanProblem


def without_extra_outputs(inputs: TraceInputs) -> TraceInputs:
    """The inputs of a call that does not collect what layers compute: no stage would have all of it."""
    options = {name: value for name, value in inputs.options.items() if name not in EXTRA_OUTPUTS}
    return replace(inputs, options=options)


class StagedForm:
    """A model that is to be cut into stages, traced as they run it.

    Args:
        problem: of its plan.
        tape: of the model, not folded.
    """

    def __init__(self, problem: PlanProblem, tape: Tape) -> None:
        self._problem = problem
        inputs = without_extra_outputs(problem.inputs)
        if inputs.options != problem.inputs.options:
            tape = trace(problem.model, inputs.tensors, RULES, inputs.options, few_chosen=inputs.few_chosen)
        if not tape.given_caches:
            tape = _given_a_cache(problem.model, inputs) or tape
        self._tape, self._inputs = tape, inputs
        self._second = second_call(problem.model, inputs)

    def with_stages(self, plan: Plan, solution: Solution) -> Plan:
        """The plan with the stages that its options ask for.

        Args:
            plan: of one stage.
            solution: that it was made of.

        Raises:
            SolveError: the model cannot be cut into stages.
            ShardconvError: it cannot be cut into so many, or not at the given layers.
        """
        return replace(plan, stages=self._stages(plan, solution))

    def with_sequence_stages(self, plan: Plan, solution: Solution) -> Plan:
        """The plan with stages, with those of its sequence-parallel form.

        Args:
            plan: with that form.
            solution: that the form was made of.

        Raises:
            SolveError: a stand-in cannot make what the ranks have parts of.
        """
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


def _given_a_cache(model: nn.Module, inputs: TraceInputs) -> Tape | None:
    """The tape of a call with an empty cache, as ``generate`` makes it of models that make none themselves.

    Returns:
        None if the model takes no cache, cannot be called so, or gives none to its modules.
    """
    if "past_key_values" not in forward_signature(model).parameters or "input_ids" not in inputs.tensors:
        return None
    options = {**inputs.options, "past_key_values": DynamicCache()}
    try:
        tape = trace(model, inputs.tensors, RULES, options, few_chosen=inputs.few_chosen)
    except SolveError:
        return None
    return tape if tape.given_caches else None


def stored_bytes(model: nn.Module, plan: Plan) -> dict[str, int]:
    """Global bytes of each parameter and persistent buffer, under the first of its names."""
    aliases = dict(plan.tied)
    return {name: tensor.nbytes for name, tensor in stored_tensors(model) if name not in aliases}
