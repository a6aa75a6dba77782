"""A plan without steps and entries for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardconv_runtime.format.plan import AllGatherStep, AllReduceStep, Boundary, Plan, SliceStep
from shardconv_runtime.parallel.plan_steps import in_use


def inference_only(plan: Plan, why: str = "") -> Plan:
    """The plan with the forward pass alone.

    Args:
        plan: a plan.
        why: why its gradients are left out.
    """
    modules = [
        replace(entry, inputs=_steps(entry.inputs), outputs=_steps(entry.outputs)) for entry in plan.modules
    ]
    kept = [m for m in modules if m.category != "boundary" or m.inputs or m.outputs or m.edits]
    parameters = tuple(replace(entry, grad_axes=(), grad_levels=0) for entry in plan.parameters)
    return replace(plan, modules=tuple(kept), parameters=parameters, training=None, inference_only=why)


def _steps(steps: Sequence[Boundary]) -> tuple[Boundary, ...]:
    return tuple(map(_without_gradient, in_use(steps, training=False)))


def _without_gradient(step: Boundary) -> Boundary:
    if isinstance(step, AllReduceStep):
        return replace(step, grad_axes=())
    if isinstance(step, AllGatherStep | SliceStep):
        return replace(step, grad_axes=(), local_grad_axes=())
    return step
