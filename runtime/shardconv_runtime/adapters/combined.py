"""One plan for several adapters of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..format.plan import Plan
from .adapter_names import renamed


def named(plan: Plan, name: str) -> Plan:
    """The plan of a model with an adapter that has a name."""

    def change(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(change, value))
        if hasattr(value, "names"):
            return replace(value, names=tuple(renamed(pattern, name) for pattern in value.names))
        return value

    training = plan.training
    if training is not None:
        sequence = training.sequence
        if sequence is not None:
            sequence = replace(
                sequence,
                modules=change(sequence.modules),
                gradients=change(sequence.gradients),
                draws=change(sequence.draws),
            )
        training = replace(training, draws=change(training.draws), sequence=sequence)
    logits = plan.logits and replace(plan.logits, module=renamed(plan.logits.module, name))
    tied = tuple((renamed(alias, name), renamed(first, name)) for alias, first in plan.tied)
    return replace(
        plan,
        parameters=change(plan.parameters),
        modules=change(plan.modules),
        tied=tied,
        logits=logits,
        training=training,
    )
