"""Simulates the ranks on numbers, before a byte is written.

All ranks run in one process, on random weights, in float64, and must return the same as the unsharded
model. Layers that others stand for are bypassed, so that deep models fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.training.sequence import FLAT_OUTPUTS
from torch import nn

from ...tracing.inputs import TraceInputs
from ..simulation.available_memory import available_bytes
from ..simulation.layer_bypass import Bypass, planned_alike
from ..simulation.rank_simulation import Outcome, Simulation, Unprovable
from ..simulation.simulated_weights import RandomWeights

MAX_SIMULATED_BYTES = 16 * 2**30
"""Above this, or half of the free memory, a model is not simulated."""


def simulate(
    plan: Plan,
    model: nn.Module,
    inputs: TraceInputs,
    bypassed: Mapping[str, Bypass] | None = None,
    max_bytes: int | None = None,
    *,
    gradients: bool = False,
) -> Outcome | None:
    """Run every rank in this process and compare with the unsharded model.

    Args:
        plan: the plan to prove.
        model: the global model, on meta; it is copied.
        inputs: of its calls.
        bypassed: layers to leave out on both sides, if they are planned as those that stand for them.
        max_bytes: memory limit of the simulation, if half of the free memory is not less;
            ``MAX_SIMULATED_BYTES`` unless given.
        gradients: run the backward pass too, if there is room for it.

    Returns:
        How they compare; None if the model is too large to be simulated here. Gradients that differ are no
        error: the outcome says which.

    Raises:
        Unprovable: the unsharded model fails.
        SolveError: the ranks' outputs differ from the unsharded model's by more than ``TOLERANCE``.
    """
    weights = RandomWeights(plan)
    simulation = Simulation(plan, model, inputs, planned_alike(plan, bypassed or {}), weights)
    room = min(max_bytes or MAX_SIMULATED_BYTES, available_bytes() // 2)
    if simulation.needed_bytes() > room:
        return None
    try:
        outcome = simulation.run(gradients and 2 * simulation.needed_bytes() <= room)
    except Unprovable as error:
        raise Unprovable(
            f"the unsharded model fails on random weights, so that the plan cannot be proven on numbers: "
            f"{error}; pass --no-check (check=False) to rely on shapes and positions"
        ) from error
    if not outcome.agrees:
        raise SolveError(
            f"the plan is wrong: simulated ranks differ from the unsharded model by {outcome.worst:.1e} of "
            f"its largest output (allowed: {outcome.tolerance:.0e}). Nothing was written. This is a bug in "
            "shardconv; please report it."
        )
    return outcome


def may_be_padded(plan: Plan, model: nn.Module, inputs: TraceInputs, bypassed: Mapping[str, Bypass]) -> bool:
    """Whether padding at the end of sequences, as the runtime adds it, changes the results of no token.

    Args:
        plan: of the model.
        model: the global model, on meta; it is copied.
        inputs: of its calls.
        bypassed: as for ``simulate``.

    Returns:
        False also where the model is too large to be run here.
    """
    mask = inputs.tensors.get("attention_mask")
    if mask is not None:  # at the end: the results of tokens that attend to nothing are not compared
        mask = torch.ones_like(mask)
        mask[0, -2:] = 0
        inputs = replace(inputs, tensors={**inputs.tensors, "attention_mask": mask})
    options = {name: value for name, value in inputs.options.items() if name not in FLAT_OUTPUTS}
    inputs = replace(inputs, options=options)
    weights = RandomWeights(plan)
    simulation = Simulation(plan, model, inputs, planned_alike(plan, bypassed), weights)
    room = min(MAX_SIMULATED_BYTES, available_bytes() // 2)
    return 2 * simulation.unsharded_bytes() <= room and simulation.agrees_when_padded()
