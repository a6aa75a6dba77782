"""Check a plan numerically: simulate its ranks, and remove the parts that are wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from textwrap import shorten

from shardconv_runtime.adapters.attaching import enable_adapters
from shardconv_runtime.errors import PlanError, SourceError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.plan_json import of_sequence
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.training.loss_parallel import has_parallel_loss
from torch import nn

from .inputs.trace_inputs import TraceInputs
from .plan_forms import without_extra_outputs
from .planning.solution import inference_only
from .simulation.layer_bypass import Bypass, bypassed_copy, planned_alike
from .simulation.rank_simulation import Logits, RanksWrong, Unprovable, with_module
from .verifying.asked_attentions import planned_attentions
from .verifying.proof import Proof, Tell, prove
from .verifying.proof_case import Case, may_be_padded, other_numbers, runs, simulate
from .verifying.shrink import Shrinking
from .verifying.small_model import FullModel, SmallModel
from .verifying.small_plan import small_plan
from .verifying.token_tables import beyond_tables

MOST_BYTES = 4 * 2**30
"""Most bytes of float64 weights of the unsharded model and all ranks. Larger models are not simulated."""
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
        """Translate the plan to this model."""
        plan = self.complete(small_plan(plan, self.small, self.skipped))
        return Case(plan, self.small.model, self.small.inputs)


def _shrink(plan: Plan, shrinking: Shrinking, complete: Callable[[Plan], Plan]) -> _Shrunk:
    """Find the smaller model for a plan."""

    def case(small: SmallModel) -> Case:
        return _Shrunk(small, shrinking.skipped, complete).case(plan)

    return _Shrunk(shrinking.run(case, lambda small: runs(case(small))), shrinking.skipped, complete)


@contextmanager
def _naming_the_module() -> Iterator[None]:
    """Add the module in which a wrong result begins to an error."""
    try:
        yield
    except RanksWrong as error:
        raise error.located() from error


class NumericCheck:
    """Simulate the ranks of plans of a traced model, on a smaller model of the same code."""

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
        """Index into ``other_numbers`` of the numbers on which the unsharded model runs."""

    def checked(self, plan: Plan) -> Plan:
        """Return the plan, proven on numbers. It becomes inference-only if a gradient is wrong."""
        case = self._case_that_fits(plan)
        if case is None:
            training = plan.training and replace(plan.training, parallel_loss=False)
            return replace(plan, training=training, notes=(*plan.notes, TOO_LARGE))
        proof, notes = self._proof(case)
        if plan.training is not None:
            plan = replace(plan, training=replace(plan.training, parallel_loss=proof.parallel_loss))
        if proof.wrong_gradient:
            find = partial(proof.case.simulation.first_wrong_gradient, proof.case.inputs)
            plan = inference_only(plan, with_module(proof.wrong_gradient, find))
        labels = ", ".join(proof.labels.names)
        if proof.labels.wrong:
            notes = (*notes, f"{labels}: a loaded model refuses labels: with them, {proof.labels.wrong}")
            plan = replace(plan, left_out=(*plan.left_out, *proof.labels.names))
        elif labels:
            notes = (*notes, f"{labels}: a loss was not compared; no form of labels was found for this code")
        plan = replace(
            plan,
            notes=(*plan.notes, *notes, *(each.note for each in proof.wrong)),
            proven_arguments=proof.arguments,
            wrong_attention=tuple(each.name for each in proof.wrong if each.kind == "attention"),
            wrong_experts=tuple(each.name for each in proof.wrong if each.kind == "experts"),
        )
        if proof.attentions is None:
            return plan
        full = self.full
        model = bypassed_copy(full.model, self.bypassed)
        return planned_attentions(plan, proof.attentions, model, full.inputs, full.folded)

    def _proof(self, case: Case) -> tuple[Proof, tuple[str, ...]]:
        """Return the proof on the first numbers on which the unsharded model runs, with a note if others
        failed.
        """
        failed: list[str] = []
        without_gradients: tuple[int, str, Proof] | None = None
        for index, (name, tried) in enumerate(other_numbers(case)):
            try:
                proof = prove(tried, self.tell)
            except Unprovable as error:
                failed.append(f"{name}: {shorten(str(error), 200)}")
                continue
            except RanksWrong as error:
                if not tried.simulation.amplifies_rounding(tried.inputs, error.worst):
                    raise error.located() from error
                failed.append(f"{name}: it amplifies rounding")
                continue
            if proof.wrong_gradient and tried.simulation.amplifies_rounding(
                tried.inputs, proof.gradient_error, gradients=True
            ):
                without_gradients = without_gradients or (index, name, proof)
                failed.append(f"{name}: its gradients amplify rounding")
                continue
            break
        else:
            if without_gradients is None:
                tensors = self.full.inputs.tensors
                if beyond := beyond_tables(self.full.analysis.tape, list(tensors), tensors):
                    raise SourceError(beyond)
                raise Unprovable(
                    "the unsharded model fails on random weights, so that the plan cannot be proven "
                    f"on numbers; tried {'; '.join(failed)}; pass --no-check (check=False) to rely on "
                    "shapes and positions"
                )
            index, name, proof = without_gradients
        self._numbers = index
        note = f"proven with {name}; the unsharded model fails with {'; '.join(failed)}"
        return proof, (note,) if failed else ()

    def require_right_when_disabled(self, plan: Plan) -> None:
        """Compare calls in which the adapters of the model are disabled."""
        case = self._case_that_fits(plan)
        if case is not None:
            model = copy.deepcopy(case.model)
            enable_adapters(model, enabled=False)
            with _naming_the_module():
                simulate(case.with_model(model), logits=Logits.GATHERED)

    def wrong_sequence_form(self, plan: Plan) -> str | None:
        """Return the error of the sequence-parallel form, for example in a gradient; None if it was not
        compared.
        """
        case = self._case_that_fits(of_sequence(plan))
        if case is None:
            return None
        if case.simulation.changes_without_cache(case.inputs):
            return "the model's results change where no cache is filled, which that form does not do"
        with _naming_the_module():
            problem = simulate(case, gradients=True).gradients
        find = partial(case.simulation.first_wrong_gradient, case.inputs)
        return with_module(problem, find) if problem else ""

    def with_right_stages(self, plan: Plan) -> Plan:
        """Check the stages of a plan in a prefill and a decoding step.

        The plan becomes inference-only if a gradient is wrong.
        """
        problem = self._wrong_stages(plan, calls=2)
        return inference_only(plan, f"with stages, {problem}") if problem else plan

    def wrong_sequence_stages(self, plan: Plan) -> str:
        """Return the error of the stages' gradients in the sequence-parallel form; empty without stages."""
        return "" if plan.stages is None else self._wrong_stages(of_sequence(plan), calls=1)

    def _wrong_stages(self, plan: Plan, calls: int) -> str:
        """Return the error of the stages' gradients; empty if they are right."""
        case = self._case_that_fits(plan)
        if case is None:
            return ""
        self.tell("stages")
        inputs = without_extra_outputs(case.inputs)
        case.simulation.evaluate_stages(inputs, calls=calls)
        if plan.training is None:
            return ""
        self.tell("gradients of stages")
        return case.simulation.wrong_stage_gradient(inputs)

    def with_padding(self, plan: Plan) -> Plan:
        """Return the plan; its sequence-parallel form may pad if that changes no token's results."""
        case = self._case_that_fits(plan)
        if case is None or not may_be_padded(case):
            return plan
        assert plan.training is not None
        assert plan.training.sequence is not None
        sequence = replace(plan.training.sequence, may_pad=True)
        return replace(plan, training=replace(plan.training, sequence=sequence))

    def case(self, plan: Plan) -> Case:
        """Return the case that is simulated for a plan: the plan translated to the smaller model."""
        skipped = planned_alike(plan, self.bypassed)
        case = self._small.get(frozenset(skipped))
        if case is None:
            case = self._small[frozenset(skipped)] = self._shrunk(plan, skipped)
        return next(islice(other_numbers(case.case(plan)), self._numbers, None))[1]

    def _shrunk(self, plan: Plan, skipped: Mapping[str, Bypass]) -> _Shrunk:
        """Find the smaller model for a plan, with fewer positions if it has many and that is possible."""
        shrinking = Shrinking.of(self.full, plan.tp, skipped)
        small = None if shrinking.has_many_positions else _shrink(plan, shrinking, self._complete)
        if small is not None and not shrinking.is_much(small.small.shapes):
            return small
        fewer = self._fewer()
        if fewer is not None:
            full, bypassed = fewer
            try:
                fewer_shrinking = Shrinking.of(full, plan.tp, planned_alike(plan, bypassed))
                smaller = _shrink(plan, fewer_shrinking, self._complete)
                case = smaller.case(plan)
                # One that is too large is not simulated. Code may require a fixed length of sounds.
                if case.simulation.needed_bytes() > MOST_BYTES or runs(case):
                    return smaller
            except PlanError:
                pass  # the plan shards positions, or does not fit at all
        return small or _shrink(plan, shrinking, self._complete)

    def _case_that_fits(self, plan: Plan) -> Case | None:
        """Return the case of a plan; None if even the smaller model is too large."""
        case = self.case(plan)
        return None if case.simulation.needed_bytes() > MOST_BYTES else case


def with_parallel_loss(plan: Plan, model: nn.Module, inputs: TraceInputs) -> Plan:
    """Enable the loss of sharded logits if it may equal the model's own. The numerical check decides."""
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
