"""Calls with labels: the model's own loss, from gathered logits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from shardconv_runtime.errors import ShardconvError
from torch import Tensor

from ..inputs.label_forms import LabelForm, forms_with_a_loss, loss_arguments, problem_type
from ..inputs.trace_inputs import TraceInputs
from ..simulation.rank_simulation import Logits, RanksWrong, Unprovable
from .proof_case import Case, simulate


@dataclass(frozen=True)
class LabelsProof:
    """The results of calls with labels."""

    names: tuple[str, ...] = ()
    """Arguments that must be refused, or that were not compared; empty if all is right."""
    wrong: str = ""
    """Why a call with them is wrong; empty if it was not compared, since its code takes no known form of
    labels."""


def _with_labels(case: Case) -> Iterator[tuple[Case, LabelForm]]:
    """Yield calls of the unsharded model that return a loss: one form of labels for each loss of its code."""
    try:
        returned, _ = case.simulation.returned(case.inputs)
    except Unprovable:
        return
    cases: dict[str | None, Case] = {}

    def loss_of(kind: str | None, inputs: TraceInputs) -> tuple[Tensor | None, str | None]:
        if kind not in cases:
            cases[kind] = case if kind is None else _with_problem_type(case, kind)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # for example, of labels that are broadcast
                outputs, model = cases[kind].simulation.returned(inputs)
        except Unprovable:
            return None, None
        return outputs.get("loss"), problem_type(model)

    for kind, form in forms_with_a_loss(case.model, case.inputs, returned, loss_of):
        yield cases[kind], form


def _with_problem_type(case: Case, kind: str) -> Case:
    model = copy.deepcopy(case.model)
    model.config.problem_type = kind  # type: ignore[union-attr]
    return case.with_model(model)


def prove_labels(case: Case, *, gradients: bool) -> LabelsProof:
    """Compare the loss of a model, and its gradients, in every form of labels that its code takes.

    Code that runs with labels only is not on the tape. It may ask a layer for its size, for example.
    """
    names = tuple(loss_arguments(case.model))
    is_compared = False
    for labelled, form in _with_labels(case) if names else ():
        try:
            outcome = simulate(labelled, form.inputs, gradients=gradients, logits=Logits.GATHERED)
            wrong = outcome.gradients or ""
        except Unprovable:
            continue  # it fails in the precision of the comparison
        except RanksWrong as error:
            wrong = error.located().problem
        except ShardconvError as error:
            wrong = str(error)
        if wrong:
            arguments = {**form.inputs.tensors, **form.inputs.options}
            return LabelsProof(names=tuple(name for name in names if name in arguments), wrong=wrong)
        is_compared = True
    return LabelsProof(names=() if is_compared else names)
