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

from ..inputs.label_forms import loss_arguments
from ..inputs.trace_inputs import TraceInputs
from ..simulation.rank_simulation import Logits, Unprovable
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
        labels = LabelsProof()
        if not loss and self.case.plan.tp > 1 and loss_arguments(self.case.model):
            self.tell("labels")
            labels = prove_labels(self.case, gradients=self.has_gradients and not problem)
        self.tell("other implementations and inputs")
        inputs = self._shown_at_once()
        is_new = loss or inputs is not self.case.inputs
        if inputs is None or (is_new and not problem and self._wrong_gradient(inputs)):
            return self._one_by_one(loss, problem, labels)
        return Proof(
            self.case, problem, loss, self.arguments, self._wrong_others(), labels, self.gradient_error
        )

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

    def _shown_at_once(self) -> TraceInputs | None:
        """Return the inputs with which eager implementations, embeddings and local logits passed one run.

        The result is None if that run failed.
        """
        plan, kinds = self.case.plan, other_kinds(self.case.model)
        eager = (
            with_implementations(self.case, dict.fromkeys(kinds, EAGER)) if kinds and plan.tp > 1 else None
        )
        if eager is None and plan.logits is None and not self.arguments:
            return self.case.inputs
        given = with_embeddings(self.case, self.arguments) if self.arguments else [self.case.inputs]
        for inputs in given:
            try:
                outcome = simulate(eager or self.case, inputs, calls=2, logits=Logits.OWN)
                if eager is not None and len(inputs.tensors) < len(self.case.inputs.tensors):
                    simulate(eager, logits=Logits.GATHERED)  # the encoders of images are eager, too
            except Unprovable:
                continue
            except ShardconvError:
                return None
            return inputs if outcome.calls >= self.calls else None
        return None

    def _one_by_one(self, loss: bool, problem: str, labels: LabelsProof) -> Proof:
        """Compare each separately. With a loss, the gradients without one have not been compared yet."""
        self.tell("implementations and inputs one by one")
        simulate(self.case, logits=Logits.OWN)
        wrong = wrong_eager(self.case) if self.case.plan.tp > 1 else ()
        problem = problem or (self._wrong_gradient(self.case.inputs) if loss else "")
        gradients = self.has_gradients and not problem
        arguments = proven_arguments(self.case, gradients=gradients)
        others = (*wrong, *self._wrong_others())
        return Proof(self.case, problem, loss, arguments, others, labels, self.gradient_error)

    def _wrong_others(self) -> tuple[Wrong, ...]:
        return wrong_others(self.case) if self.case.plan.tp > 1 else ()

    def _wrong_gradient(self, inputs: TraceInputs) -> str:
        if not self.has_gradients:
            return ""
        problem = self.case.simulation.wrong_gradient(inputs)
        if problem:
            self.gradient_error = max(self.gradient_error, self.case.simulation.gradient_error)
        return problem
