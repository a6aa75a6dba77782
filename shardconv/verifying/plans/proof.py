"""What of a plan holds, shown on numbers in as few runs as can show it.

A plan is for more than the calls that were traced: a loss of sharded logits, logits that stay on the ranks,
the plain implementations of attention and experts, and embeddings in place of ids. Each of these concerns
another part of the model, so that one run shows several. Only where such a run fails is each of them run by
itself, which says what does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.parallel.boundary import forward_signature

from ...tracing.inputs import TraceInputs
from ..simulation.rank_simulation import Logits, Unprovable
from .given_embeddings import embedding_arguments, proven_arguments, with_embeddings
from .implementations import PLAIN, Wrong, other_kinds, with_implementations, wrong_others, wrong_plain
from .simulate import Case, simulate

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Proof:
    """What holds of a plan whose outputs are right."""

    wrong_gradient: str
    """What is wrong with the gradients; empty if nothing is, or the plan has none."""
    parallel_loss: bool
    """Whether the loss of sharded logits is the model's own."""
    arguments: tuple[str, ...]
    """For embeddings in place of ids."""
    wrong: tuple[Wrong, ...]
    """Implementations for which the plan does not hold."""
    wrong_labels: str = ""
    """Why a call with labels is wrong, as without training; empty if it is right, or the model takes none."""


def prove(case: Case, tell: Tell = lambda what: None) -> Proof:
    """Compare all that a plan is for with the unsharded model.

    Args:
        case: of the plan; its parallel loss is one that may be the model's own.
        tell: is called with what is run next.

    Raises:
        Unprovable: the unsharded model fails.
        SolveError: the ranks compute something else.
    """
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
        self.calls = 1
        """How many were compared: two, if the unsharded model takes what it hands back."""

    def run(self) -> Proof:
        """All of it."""
        self.tell("outputs, loss and gradients")
        loss = self._holds_with_labels()
        wrong_labels = ""
        if not loss:
            self._leave_out_loss()
            wrong_labels = self._wrong_labels()
        if not loss or self.calls == 1:  # some hand nothing back in a call with labels
            self.calls = simulate(self.case, calls=2, logits=Logits.GATHERED).calls
        problem = self._wrong_gradient(self.case.inputs) if not loss else ""
        self.tell("other implementations and inputs")
        inputs = self._shown_at_once()
        is_new = loss or inputs is not self.case.inputs
        if inputs is None or (is_new and not problem and self._wrong_gradient(inputs)):
            return replace(self._one_by_one(loss, problem), wrong_labels=wrong_labels)
        return Proof(problem, loss, self.arguments, self._wrong_others(), wrong_labels)

    def _holds_with_labels(self) -> bool:
        """Whether outputs, the loss of sharded logits and the gradients of both are right."""
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

    def _wrong_labels(self) -> str:
        """Why the model's own loss, from gathered logits, is not that of the unsharded model; empty if it is.

        Code that runs with labels only is not on the tape. It may ask a layer for its size, for example.
        """
        if self.case.plan.tp == 1 or "labels" not in forward_signature(self.case.model).parameters:
            return ""
        try:
            simulate(self.case, self.case.inputs.with_labels(), logits=Logits.GATHERED)
        except (Unprovable, KeyError):
            return ""  # the unsharded model takes other labels than tokens, or none
        except ShardconvError as error:
            return str(error).partition(". Nothing was written")[0]
        return ""

    def _leave_out_loss(self) -> None:
        training = self.case.plan.training
        if training is not None and training.parallel_loss:
            plan = replace(self.case.plan, training=replace(training, parallel_loss=False))
            self.case = replace(self.case, plan=plan)

    def _shown_at_once(self) -> TraceInputs | None:
        """The inputs with which plain implementations, embeddings and own logits were shown in one run.

        None: that run failed.
        """
        plan, kinds = self.case.plan, other_kinds(self.case.model)
        plain = (
            with_implementations(self.case, dict.fromkeys(kinds, PLAIN)) if kinds and plan.tp > 1 else None
        )
        if plain is None and plan.logits is None and not self.arguments:
            return self.case.inputs
        given = with_embeddings(self.case, self.arguments) if self.arguments else [self.case.inputs]
        for inputs in given:
            try:
                outcome = simulate(plain or self.case, inputs, calls=2, logits=Logits.OWN)
                if plain is not None and len(inputs.tensors) < len(self.case.inputs.tensors):
                    simulate(plain, logits=Logits.GATHERED)  # what reads images is implemented so, too
            except Unprovable:
                continue
            except ShardconvError:
                return None
            return inputs if outcome.calls >= self.calls else None
        return None

    def _one_by_one(self, loss: bool, problem: str) -> Proof:
        """Each by itself; with a loss, the gradients without one are not known yet."""
        self.tell("implementations and inputs one by one")
        simulate(self.case, logits=Logits.OWN)
        wrong = wrong_plain(self.case) if self.case.plan.tp > 1 else ()
        problem = problem or (self._wrong_gradient(self.case.inputs) if loss else "")
        gradients = self.has_gradients and not problem
        arguments = proven_arguments(self.case, gradients=gradients)
        return Proof(problem, loss, arguments, (*wrong, *self._wrong_others()))

    def _wrong_others(self) -> tuple[Wrong, ...]:
        return wrong_others(self.case) if self.case.plan.tp > 1 else ()

    def _wrong_gradient(self, inputs: TraceInputs) -> str:
        return self.case.simulation.wrong_gradient(inputs) if self.has_gradients else ""
