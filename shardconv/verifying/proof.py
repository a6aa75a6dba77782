"""Prove on numbers that all uses of a plan are right, in as few runs as possible.

A plan is used for more than the calls that were traced: a loss of sharded logits, logits that stay on the
ranks, eager attention and experts, and embeddings in place of ids. Each of these concerns another part of the
model, so one run checks several of them. If such a run fails, each is run separately to find out which one is
wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.parallel.boundary import forward_signature

from ..inputs.example_inputs import required_arguments
from ..inputs.label_forms import loss_arguments
from ..inputs.trace_inputs import TraceInputs
from ..planning.attention_plans import Gathers, asking, attention_gathers
from ..simulation.rank_simulation import Logits, Unprovable
from .asked_attentions import are_right, asked_case
from .given_embeddings import embedding_arguments, proven_arguments, with_embeddings
from .implementations import EAGER, Wrong, other_kinds, with_implementations, wrong_eager, wrong_others
from .labelled_calls import LabelsProof, prove_labels
from .proof_case import Case, simulate

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Proof:
    """The results for a plan whose outputs are right."""

    case: Case
    """The plan, with its model and inputs."""
    wrong_gradient: str
    """The problem of the gradients; empty if they are right, or the plan has none."""
    parallel_loss: bool
    """Whether the loss of sharded logits equals the model's own loss."""
    arguments: tuple[str, ...]
    """Arguments for embeddings in place of ids."""
    wrong: tuple[Wrong, ...]
    """Implementations for which the plan is wrong."""
    labels: LabelsProof
    """Calls with labels, from gathered logits."""
    attentions: Gathers | None
    """The gathers of attention weights that a call asks for; None if they are not granted."""
    gradient_error: float = 0.0
    """The largest error of the gradients that are wrong."""


def prove(case: Case, tell: Tell = lambda what: None) -> Proof:
    """Compare everything that a plan is used for with the unsharded model."""
    arguments = embedding_arguments(case.model, case.inputs) if case.plan.tp > 1 else ()
    plan = replace(case.plan, proven_arguments=arguments)
    return _Proof(replace(case, plan=plan), arguments, tell).run()


class _Proof:
    """One case."""

    def __init__(self, case: Case, arguments: tuple[str, ...], tell: Tell) -> None:
        self.case = case
        self.tell = tell
        self.arguments = arguments
        self.has_gradients = case.plan.training is not None
        self.gradient_error = 0.0
        self.attentions: Gathers | None = None
        """The gathers of attention weights, once they are right."""
        self.calls = 1
        """Number of calls that were compared: two, if the unsharded model can continue a call."""

    def run(self) -> Proof:
        """Compare everything, in one run if possible."""
        self.tell("outputs, loss and gradients")
        loss = self._holds_with_labels()
        if not loss:
            training = self.case.plan.training
            if training is not None and training.parallel_loss:
                plan = replace(self.case.plan, training=replace(training, parallel_loss=False))
                self.case = replace(self.case, plan=plan)
        if not loss or self.calls == 1:  # some models return no cache in a call with labels
            self.calls = simulate(self.case, calls=2, logits=Logits.GATHERED).calls
        problem = self._wrong_gradient(self.case.inputs) if not loss else ""
        unmasked = self.case.inputs.without_patch_mask()
        taken = forward_signature(self.case.model).parameters
        if unmasked is not None and not required_arguments(taken, unmasked.tensors):
            simulate(self.case, unmasked, logits=Logits.GATHERED)
            problem = problem or self._wrong_gradient(unmasked)
        labels = LabelsProof()
        if not loss and self.case.plan.tp > 1 and loss_arguments(self.case.model):
            self.tell("labels")
            labels = prove_labels(self.case, gradients=self.has_gradients and not problem)
        self.tell("other implementations and inputs")
        plan = self.case.plan
        gathers = attention_gathers(self.case.model, self.case.inputs, plan) if plan.tp > 1 else None
        shown = self._shown_at_once(gathers)
        if shown is None:
            return self._one_by_one(loss, problem, labels, gathers)
        case, inputs = shown
        is_new = loss or inputs is not self.case.inputs
        if is_new and not problem and self._wrong_gradient(inputs, case):
            return self._one_by_one(loss, problem, labels, gathers)
        self.attentions = gathers
        case.simulation.drop_many()
        arguments = self.arguments
        if not inputs.tensors.keys() >= set(arguments):
            arguments = proven_arguments(self.case, gradients=self.has_gradients and not problem)
        return self._proof(loss, problem, arguments, self._wrong_others(), labels)

    def _holds_with_labels(self) -> bool:
        """Return whether outputs, the loss of sharded logits, and the gradients of both are right."""
        training = self.case.plan.training
        if training is None or not training.parallel_loss:
            return False
        labels = self.case.inputs.with_labels()
        try:
            outcome = simulate(self.case, labels, gradients=True, calls=2, logits=Logits.GATHERED)
        except ShardconvError:
            return False  # the loss needs full logits, or the model cannot compute one
        self.calls = outcome.calls
        return not outcome.gradients

    def _shown_at_once(self, gathers: Gathers | None) -> tuple[Case, TraceInputs] | None:
        """Return the case and inputs of a run that shows eager implementations, embeddings, local logits and
        attention weights at once.

        The result is None if that run failed.
        """
        plan, kinds = self.case.plan, other_kinds(self.case.model)
        eager = (
            with_implementations(self.case, dict.fromkeys(kinds, EAGER)) if kinds and plan.tp > 1 else None
        )
        if eager is None and plan.logits is None and not self.arguments and gathers is None:
            return self.case, self.case.inputs
        shown = eager or self.case
        if gathers is not None:
            shown = asked_case(shown, gathers)
        calls = with_embeddings(self.case, self.arguments) if self.arguments else ()
        # Code may take no embeddings without ids, or only some of them.
        for usual in (*calls, self.case.inputs):
            inputs = usual if gathers is None else asking(usual)
            try:
                outcome = simulate(shown, inputs, calls=2, logits=Logits.OWN)
                if eager is not None and len(inputs.tensors) < len(self.case.inputs.tensors):
                    simulate(eager, logits=Logits.GATHERED)  # the encoders of images are eager, too
            except Unprovable:
                continue
            except ShardconvError:
                return None
            return (shown, inputs) if outcome.calls >= self.calls else None
        return None

    def _one_by_one(self, loss: bool, problem: str, labels: LabelsProof, gathers: Gathers | None) -> Proof:
        """Compare each separately. With a loss, the gradients without one have not been compared yet."""
        self.tell("implementations and inputs one by one")
        simulate(self.case, logits=Logits.OWN)
        wrong = wrong_eager(self.case) if self.case.plan.tp > 1 else ()
        problem = problem or (self._wrong_gradient(self.case.inputs) if loss else "")
        gradients = self.has_gradients and not problem
        arguments = proven_arguments(self.case, gradients=gradients)
        problems = (*wrong, *self._wrong_others())
        is_wrong = ("attention", EAGER) in [(each.kind, each.name) for each in wrong]
        if gathers is not None and not is_wrong and are_right(self.case, gathers, gradients=gradients):
            self.attentions = gathers
        return self._proof(loss, problem, arguments, problems, labels)

    def _proof(
        self,
        loss: bool,
        problem: str,
        arguments: tuple[str, ...],
        wrong: tuple[Wrong, ...],
        labels: LabelsProof,
    ) -> Proof:
        return Proof(self.case, problem, loss, arguments, wrong, labels, self.attentions, self.gradient_error)

    def _wrong_others(self) -> tuple[Wrong, ...]:
        return wrong_others(self.case) if self.case.plan.tp > 1 else ()

    def _wrong_gradient(self, inputs: TraceInputs, case: Case | None = None) -> str:
        if not self.has_gradients:
            return ""
        simulation = (case or self.case).simulation
        problem = simulation.wrong_gradient(inputs)
        if problem:
            self.gradient_error = max(self.gradient_error, simulation.gradient_error)
        return problem
