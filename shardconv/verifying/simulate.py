"""Simulates the ranks on numbers, before a byte is written.

All ranks run in one process, on random weights, in float64, and must return the same as the unsharded
model. Models are made smaller first, so that this takes little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.training.sequence import FLAT_OUTPUTS
from torch import nn

from ..inputs.trace_inputs import TraceInputs
from ..simulation.rank_simulation import Logits, Outcome, Simulation, Unprovable
from ..simulation.simulated_weights import USUAL, Draw, RandomWeights
from ..solving.sequence_dims import SECOND_TOKENS


class OutputsDiffer(SolveError):
    """The ranks return other numbers than the unsharded model."""


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    plan: Plan
    model: nn.Module
    """Unsharded, on meta; it is copied."""
    inputs: TraceInputs
    """Of its calls."""
    draw: Draw = USUAL
    """Of its weights."""

    @cached_property
    def simulation(self) -> Simulation:
        """On random weights; its models are made once."""
        return Simulation(self.plan, self.model, RandomWeights(self.plan, self.draw))

    def with_model(self, model: nn.Module) -> Case:
        """The case of another model with the same parameters, on the same weights."""
        case = replace(self, model=model)
        case.__dict__["simulation"] = Simulation(self.plan, model, self.simulation.weights)
        return case


def simulate(
    case: Case,
    inputs: TraceInputs | None = None,
    *,
    gradients: bool = False,
    calls: int = 1,
    logits: Logits = Logits.BOTH,
) -> Outcome:
    """Run every rank in this process and compare with the unsharded model.

    Args:
        case: the plan to prove, and its model.
        inputs: others than those of the case.
        gradients: run the backward pass too.
        calls: 2: hand back what the first call returns, and compare a second one.
        logits: which of the ranks' logits are compared.

    Returns:
        How they compare. Gradients that differ are no error: the outcome says which.

    Raises:
        Unprovable: the unsharded model fails.
        OutputsDiffer: the ranks' outputs differ from the unsharded model's by more than ``TOLERANCE``.
        SolveError: the ranks fail.
    """
    inputs = inputs or case.inputs
    outcome = case.simulation.evaluate(inputs, calls=calls, logits=logits)
    if not outcome.agrees:
        raise OutputsDiffer(
            f"the plan is wrong: simulated ranks differ from the unsharded model by {outcome.worst:.1e} of "
            f"its largest output (allowed: {outcome.tolerance:.0e}). Nothing was written. This is a bug in "
            "shardconv; please report it."
        )
    return replace(outcome, gradients=case.simulation.wrong_gradient(inputs)) if gradients else outcome


def runs(case: Case) -> bool:
    """Whether the unsharded model runs on random weights."""
    try:
        case.simulation.run_unsharded(case.inputs)
    except Unprovable:
        return False
    return True


def may_be_padded(case: Case) -> bool:
    """Whether padding at the end of sequences, as the runtime adds it, changes the results of no token.

    It pads one sequence: never that of an encoder beside a decoder's.
    """
    inputs = case.inputs
    if SECOND_TOKENS in inputs.tensors:
        return False
    mask = inputs.tensors.get("attention_mask")
    if mask is not None:  # at the end: the results of tokens that attend to nothing are not compared
        mask = torch.ones_like(mask)
        mask[0, -2:] = 0
        inputs = replace(inputs, tensors={**inputs.tensors, "attention_mask": mask})
    options = {name: value for name, value in inputs.options.items() if name not in FLAT_OUTPUTS}
    return case.simulation.agrees_when_padded(replace(inputs, options=options))


# Other weights and inputs for models that fail on the first ones.
#
# Code divides by what it counts, takes logarithms, or asks for what the first random numbers do not give.
# Such a model is tried with a few others, always the same ones in the same order.

_DRAWS = (Draw(1), Draw(4, vectors=0.02), Draw(2, 0.25), Draw(3, 4.0))
"""The second is for code that divides vectors by the standard deviation with which they are initialized."""


def other_numbers(case: Case) -> Iterator[tuple[str, Case]]:
    """The case as it is and with other numbers, and in words what these are."""
    yield f"weights of {case.draw}", case
    for draw in _DRAWS:
        yield f"weights of {draw}", replace(case, draw=draw)
    yield "ids in reverse order", replace(case, inputs=_reversed(case.inputs))


def _reversed(inputs: TraceInputs) -> TraceInputs:
    """The ids of each row in reverse order, so that there are as many of each."""
    ids = {n: t.flip(1) for n, t in inputs.tensors.items() if _is_per_token(n, inputs)}
    return replace(inputs, tensors={**inputs.tensors, **ids})


def _is_per_token(name: str, inputs: TraceInputs) -> bool:
    tensor, ids = inputs.tensors[name], inputs.tensors.get("input_ids")
    if ids is None or tensor.is_floating_point() or name.endswith("attention_mask"):
        return False
    return tensor.shape[:2] == ids.shape[:2]
