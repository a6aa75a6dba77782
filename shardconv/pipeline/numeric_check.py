"""The numerical check of a plan: its ranks are simulated, and forms that differ are taken out of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from textwrap import shorten

from shardconv_runtime.adapters.attaching import enable_adapters
from shardconv_runtime.errors import PlanError, SolveError, SourceError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.plan_json import of_sequence
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.training.loss_parallel import has_parallel_loss
from torch import nn

from ..inputs.trace_inputs import TraceInputs
from ..planning.solution import inference_only
from ..simulation.layer_bypass import Bypass, planned_alike
from ..simulation.rank_simulation import Logits, Unprovable
from ..verifying.proof import (
    Case,
    OutputsDiffer,
    Proof,
    Tell,
    may_be_padded,
    other_numbers,
    prove,
    runs,
    simulate,
)
from ..verifying.shrink import Shrinking
from ..verifying.small_model import FullModel, SmallModel
from ..verifying.small_plan import small_plan
from ..verifying.token_tables import beyond_tables
from .plan_forms import without_extra_outputs

MOST_BYTES = 4 * 2**30
"""Of float64 weights of the unsharded model and of all ranks, beyond which a model is not simulated."""
TOO_LARGE = "no smaller model of its code was found: shapes and positions were checked, not numbers"


Source = tuple[FullModel, Mapping[str, Bypass]]
"""A model to shrink, and layers to leave out."""


@dataclass(frozen=True)
class _Shrunk:
    """A smaller model."""

    small: SmallModel
    skipped: Mapping[str, Bypass]
    complete: Callable[[Plan], Plan]

    def case(self, plan: Plan) -> Case:
        """What the plan says of it.

        Raises:
            PlanError: if the plan cannot be said of it.
        """
        plan = self.complete(small_plan(plan, self.small, self.skipped))
        return Case(plan, self.small.model, self.small.inputs)


def _shrink(plan: Plan, shrinking: Shrinking, complete: Callable[[Plan], Plan]) -> _Shrunk:
    """The smaller model for a plan.

    Raises:
        PlanError: if the plan does not fit.
    """

    def case(small: SmallModel) -> Case:
        return _Shrunk(small, shrinking.skipped, complete).case(plan)

    return _Shrunk(shrinking.run(case, lambda small: runs(case(small))), shrinking.skipped, complete)


class NumericCheck:
    """A traced model, to simulate the ranks of its plans on a smaller model of the same code.

    Args:
        full: the model at its true size.
        bypassed: layers to leave out, where a plan says of them what it says of those that stand for them.
        tell: is called with what is simulated next.
        with_fewer_positions: gives a model of the same code that sees smaller images or sounds, and its
            layers to leave out, if there is one; asked where the activations of the full one are large.
        complete: adds to the plan of a smaller model what will be added to that of the full one.
    """

    def __init__(
        self,
        full: FullModel,
        bypassed: Mapping[str, Bypass],
        tell: Tell = lambda what: None,
        with_fewer_positions: Callable[[], Source | None] = lambda: None,
        complete: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> None:
        self.tell = tell
        self.full = full
        self.bypassed = bypassed
        self._fewer = cache(with_fewer_positions)
        self._complete = complete
        self._small: dict[frozenset[str], _Shrunk] = {}
        self._numbers = 0
        """Which of ``other_numbers`` the unsharded model was found to run on."""

    def checked(self, plan: Plan) -> Plan:
        """The plan, proven on numbers; for inference only if a gradient is not that of the unsharded model.

        Raises:
            SolveError: if the ranks compute something else.
        """
        case = self._case_that_fits(plan)
        if case is None:
            training = plan.training and replace(plan.training, parallel_loss=False)
            return replace(plan, training=training, notes=(*plan.notes, TOO_LARGE))
        proof, notes = self._proof(case)
        if plan.training is not None:
            plan = replace(plan, training=replace(plan.training, parallel_loss=proof.parallel_loss))
        if proof.wrong_gradient:
            plan = inference_only(plan, proof.wrong_gradient)
        if proof.wrong_labels:
            notes = (*notes, f"labels are refused: with them, {proof.wrong_labels}")
            plan = replace(plan, left_out=(*plan.left_out, "labels"))
        return replace(
            plan,
            notes=(*plan.notes, *notes, *(each.note for each in proof.wrong)),
            proven_arguments=proof.arguments,
            wrong_attention=tuple(each.name for each in proof.wrong if each.kind == "attention"),
            wrong_experts=tuple(each.name for each in proof.wrong if each.kind == "experts"),
        )

    def _proof(self, case: Case) -> tuple[Proof, tuple[str, ...]]:
        """The proof on the first numbers on which the unsharded model runs, and a note on those before.

        Raises:
            Unprovable: if there are none.
            SourceError: if ids of the config lie beyond the vocabulary.
            SolveError: if the ranks compute something else.
        """
        failed: list[str] = []
        without_gradients: tuple[int, str, Proof] | None = None
        for index, (name, tried) in enumerate(other_numbers(case)):
            try:
                proof = prove(tried, self.tell)
            except Unprovable as error:
                failed.append(f"{name}: {shorten(str(error), 200)}")
                continue
            except OutputsDiffer:
                if not tried.simulation.amplifies_rounding(tried.inputs):
                    raise
                failed.append(f"{name}: it amplifies rounding")
                continue
            if proof.wrong_gradient and tried.simulation.amplifies_rounding(tried.inputs, gradients=True):
                without_gradients = without_gradients or (index, name, proof)
                failed.append(f"{name}: its gradients amplify rounding")
                continue
            break
        else:
            if without_gradients is None:
                raise self._unproven(failed)
            index, name, proof = without_gradients
        self._numbers = index
        note = f"proven with {name}; the unsharded model fails with {'; '.join(failed)}"
        return proof, (note,) if failed else ()

    def _unproven(self, failed: Sequence[str]) -> SolveError | SourceError:
        """The error of a model that fails on all numbers that were tried."""
        tensors = self.full.inputs.tensors
        if beyond := beyond_tables(self.full.analysis.tape, list(tensors), tensors):
            return SourceError(beyond)
        return Unprovable(
            "the unsharded model fails on random weights, so that the plan cannot be proven on numbers; "
            f"tried {'; '.join(failed)}; pass --no-check (check=False) to rely on shapes and positions"
        )

    def require_right_when_disabled(self, plan: Plan) -> None:
        """Compare calls in which the adapters of the model are disabled.

        Raises:
            SolveError: if the ranks compute something else.
        """
        case = self._case_that_fits(plan)
        if case is not None:
            model = copy.deepcopy(case.model)
            enable_adapters(model, enabled=False)
            simulate(case.with_model(model), logits=Logits.GATHERED)

    def wrong_sequence_form(self, plan: Plan) -> str | None:
        """What is wrong with the sequence-parallel form, such as a gradient; nothing if it was not compared.

        Raises:
            SolveError: if the ranks compute something else in that form.
        """
        case = self._case_that_fits(of_sequence(plan))
        if case is None:
            return None
        if case.simulation.changes_without_cache(case.inputs):
            return "the model's results change where no cache is filled, which that form does not do"
        return simulate(case, gradients=True).gradients

    def with_right_stages(self, plan: Plan) -> Plan:
        """The plan, of whose stages the last one returned what it should in a prefill and a step of decoding;
        for inference only if a gradient is not that of the unsharded model.

        Raises:
            SolveError: if the last stage returned something else.
        """
        problem = self._wrong_stages(plan, calls=2)
        return inference_only(plan, f"with stages, {problem}") if problem else plan

    def wrong_sequence_stages(self, plan: Plan) -> str:
        """What is wrong with the gradients of stages in the sequence-parallel form; empty without stages.

        Raises:
            SolveError: if the last stage returned something else.
        """
        return "" if plan.stages is None else self._wrong_stages(of_sequence(plan), calls=1)

    def _wrong_stages(self, plan: Plan, calls: int) -> str:
        """What is wrong with the gradients of stages.

        Args:
            plan: in one form.
            calls: 2: with a step of decoding behind a prefill.

        Raises:
            SolveError: if the last stage returned something else.
        """
        case = self._case_that_fits(plan)
        if case is None:
            return ""
        self.tell("stages")
        inputs = without_extra_outputs(case.inputs)
        outcome = case.simulation.evaluate_stages(inputs, calls=calls)
        if not outcome.agrees:
            raise SolveError(
                "the model cannot be cut into stages: the last stage's results differ from the unsharded "
                f"model's by {outcome.worst:.1e} of the largest (allowed: {outcome.tolerance:.0e})"
            )
        if plan.training is None:
            return ""
        self.tell("gradients of stages")
        return case.simulation.wrong_stage_gradient(inputs)

    def with_padding(self, plan: Plan) -> Plan:
        """The plan, whose sequence-parallel form may pad if that changes no token's results."""
        case = self._case_that_fits(plan)
        if case is None or not may_be_padded(case):
            return plan
        assert plan.training is not None
        assert plan.training.sequence is not None
        sequence = replace(plan.training.sequence, may_pad=True)
        return replace(plan, training=replace(plan.training, sequence=sequence))

    def case(self, plan: Plan) -> Case:
        """What is simulated for a plan: the smaller model, and what the plan says of it."""
        skipped = planned_alike(plan, self.bypassed)
        known = self._small.get(frozenset(skipped))
        if known is None:
            known = self._small[frozenset(skipped)] = self._shrunk(plan, skipped)
        return next(islice(other_numbers(known.case(plan)), self._numbers, None))[1]

    def _shrunk(self, plan: Plan, skipped: Mapping[str, Bypass]) -> _Shrunk:
        """The smaller model for a plan, with fewer positions if it has many and that is possible."""
        shrinking = Shrinking.of(self.full, plan.tp, skipped)
        found = None if shrinking.has_many_positions else _shrink(plan, shrinking, self._complete)
        if found is not None and not shrinking.is_much(found.small.shapes):
            return found
        fewer = self._fewer()
        if fewer is not None:
            full, bypassed = fewer
            try:
                fewer_shrinking = Shrinking.of(full, plan.tp, planned_alike(plan, bypassed))
                smaller = _shrink(plan, fewer_shrinking, self._complete)
                if runs(smaller.case(plan)):  # code may know how long a sound is
                    return smaller
            except PlanError:
                pass  # the plan shards positions, or does not fit at all
        return found or _shrink(plan, shrinking, self._complete)

    def _case_that_fits(self, plan: Plan) -> Case | None:
        """The case of a plan; None where even the smaller model is too large."""
        case = self.case(plan)
        return None if case.simulation.needed_bytes() > MOST_BYTES else case


def with_parallel_loss(plan: Plan, model: nn.Module, inputs: TraceInputs) -> Plan:
    """The plan, with the loss of sharded logits where that may be the model's own; numbers prove it.

    Args:
        plan: of the model.
        model: the global model, on meta.
        inputs: of the trace.
    """
    takes_labels = "labels" in forward_signature(model).parameters and hasattr(model, "loss_function")
    one_sequence = "input_ids" in inputs.tensors and "decoder_input_ids" not in inputs.tensors
    if (
        plan.training is None
        or plan.logits is None
        or plan.tp == 1
        or not takes_labels
        or not one_sequence
        or not has_parallel_loss(getattr(model, "loss_type", None))
    ):
        return plan
    return replace(plan, training=replace(plan.training, parallel_loss=True))
