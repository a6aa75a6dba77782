"""Simulates the ranks on numbers, before a byte is written.

All ranks run in one process, on random weights, in float64, and must return the same as the unsharded
model. Models are made smaller first, so that this takes little memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.training.sequence import FLAT_OUTPUTS
from torch import nn

from ...solving.sequence_dims import SECOND_TOKENS
from ...tracing.inputs import TraceInputs
from ..simulation.rank_simulation import Logits, Outcome, Simulation, Unprovable
from ..simulation.simulated_weights import USUAL, Draw, RandomWeights


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
        SolveError: the ranks' outputs differ from the unsharded model's by more than ``TOLERANCE``.
    """
    inputs = inputs or case.inputs
    outcome = case.simulation.evaluate(inputs, calls=calls, logits=logits)
    if not outcome.agrees:
        raise SolveError(
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
