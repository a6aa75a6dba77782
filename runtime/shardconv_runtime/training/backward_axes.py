"""The mesh axes that the collectives of a backward pass run over."""

from __future__ import annotations

from collections.abc import Iterable

from ..format.dims import axes_of
from ..format.grad_sums import sums
from ..format.plan import Plan
from ..format.slot_steps import AllGatherStep, AllReduceStep, Boundary, GradAllReduceStep, SliceStep


def backward_axes(plan: Plan) -> list[Iterable[int]]:
    """The sets of mesh axes of the collectives of training, beside those of a forward pass."""
    steps = [step for entry in plan.modules for step in (*entry.inputs, *entry.outputs)]
    return [
        range(len(plan.mesh)),
        *(axes for step in steps for axes in _of_step(step)),
        *(each.axes for p in plan.parameters for each in sums(p, plan.mesh, 0, p.grad_axes)),
    ]


def _of_step(step: Boundary) -> Iterable[Iterable[int]]:
    match step:
        case GradAllReduceStep():
            yield step.axes
        case AllReduceStep() | AllGatherStep():
            yield step.grad_axes
        case SliceStep():
            yield axes_of(step.layout).difference(step.grad_axes)
