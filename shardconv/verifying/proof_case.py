"""The case of a plan: its model, and the numbers on which its ranks are simulated before a byte is written.

All ranks run in one process, on random weights, in float64, and must return the same as the unsharded model.
Models are made smaller first, so that this takes little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.training.sequence import FLAT_OUTPUTS
from torch import nn

from ..inputs.trace_inputs import TraceInputs
from ..planning.gradients import SECOND_TOKENS
from ..simulation.random_weights import USUAL, Draw, RandomWeights
from ..simulation.rank_simulation import Logits, Outcome, Simulation, Unprovable


@dataclass(frozen=True)
class Case:
    """A plan, its model, and the numbers to simulate them on."""

    plan: Plan
    model: nn.Module
    """Unsharded, on meta; it is copied."""
    inputs: TraceInputs
    draw: Draw = USUAL
    """Random numbers of the weights."""

    @cached_property
    def simulation(self) -> Simulation:
        """Return the simulation on random weights, which builds its models once."""
        return Simulation(self.plan, self.model, RandomWeights(self.plan, self.draw))

    def with_model(self, model: nn.Module, plan: Plan | None = None) -> Case:
        """Return the case of another model, or plan, with the same parameters, on the same weights."""
        self.simulation.drop_many()  # the other models are used first
        case = replace(self, model=model, plan=plan or self.plan)
        case.__dict__["simulation"] = Simulation(case.plan, model, self.simulation.weights)
        return case


def simulate(
    case: Case,
    inputs: TraceInputs | None = None,
    *,
    gradients: bool = False,
    calls: int = 1,
    logits: Logits = Logits.BOTH,
) -> Outcome:
    """Compare the ranks with the unsharded model; wrong gradients are no error, the outcome has them."""
    inputs = inputs or case.inputs
    outcome = case.simulation.evaluate(inputs, calls=calls, logits=logits)
    return replace(outcome, gradients=case.simulation.wrong_gradient(inputs)) if gradients else outcome


def runs(case: Case) -> bool:
    """Return whether the unsharded model runs on random weights."""
    try:
        case.simulation.run_unsharded(case.inputs)
    except Unprovable:
        return False
    return True


def may_be_padded(case: Case) -> bool:
    """Return whether the runtime's padding at the end of sequences leaves the results of all tokens
    unchanged.

    The runtime pads one sequence, so models with an encoder and a decoder are not padded.
    """
    inputs = case.inputs
    if SECOND_TOKENS in inputs.tensors:
        return False
    mask = inputs.tensors.get("attention_mask")
    if mask is not None:  # masked at the end, since masking at the start leaves tokens that attend to nothing
        mask = torch.ones_like(mask)
        mask[0, -2:] = 0
        inputs = replace(inputs, tensors={**inputs.tensors, "attention_mask": mask})
    options = {name: value for name, value in inputs.options.items() if name not in FLAT_OUTPUTS}
    return case.simulation.agrees_when_padded(replace(inputs, options=options))


# Some models fail on the first random numbers: they divide by counts, take logarithms, or require certain
# values. They are tried with a few other numbers, always the same ones in the same order.

_DRAWS = (Draw(1), Draw(4, vectors=0.02), Draw(2, 0.25), Draw(3, 4.0))
"""Small vectors are for code that divides vectors by the standard deviation of their initialization."""


def other_numbers(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the case as it is and with other numbers, each with a description."""
    yield f"weights of {case.draw}", case
    for draw in _DRAWS:
        yield f"weights of {draw}", replace(case, draw=draw)
    # Reversing all integers per token keeps their counts, and keeps them consistent with the ids.
    tensors = case.inputs.tensors
    ids = tensors.get("input_ids")
    flipped = {
        name: tensor.flip(1)
        for name, tensor in tensors.items()
        if ids is not None and not tensor.is_floating_point() and not name.endswith("attention_mask")
        if tensor.shape[:2] == ids.shape[:2]
    }
    yield "ids in reverse order", replace(case, inputs=replace(case.inputs, tensors={**tensors, **flipped}))
