"""The steps of a plan as operations of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from ..comm.collectives import Communicator
from ..comm.steps import (
    Gather,
    GradDivide,
    GradReduce,
    Inner,
    KeepOnFirst,
    Reduce,
    ReduceScatter,
    Resharding,
    Slice,
)
from ..errors import PlanError
from ..format.dims import open_parts
from ..format.plan import (
    AllGatherStep,
    AllReduceStep,
    Boundary,
    GradAllReduceStep,
    GradDivideStep,
    KeepOnFirstStep,
    ReduceScatterStep,
    ReshardingStep,
    SliceStep,
)

TensorStep = Callable[[Tensor], Tensor]
"""A step on a local tensor; the classes of ``comm`` say the shapes and the backward of each."""

GRADIENT_STEPS = (GradAllReduceStep, GradDivideStep)
"""Steps that change the gradient alone."""

_RESHARDING: Mapping[type[ReshardingStep], type[Resharding]] = {
    AllGatherStep: Gather,
    SliceStep: Slice,
    ReduceScatterStep: ReduceScatter,
}


def step(boundary: Boundary, comm: Communicator, training: bool = False) -> TensorStep:
    """The operation of a step that needs only the tensor.

    Args:
        boundary: the step of the plan.
        comm: the ranks.
        training: give it a backward.

    Raises:
        PlanError: the step needs more than the tensor.
    """
    match boundary:
        case AllReduceStep():
            return Reduce(comm, boundary.axes, boundary.grad_axes if training else None)
        case KeepOnFirstStep():
            return KeepOnFirst(comm, boundary.axes, training)
        case GradAllReduceStep() | GradDivideStep():
            kind = GradReduce if isinstance(boundary, GradAllReduceStep) else GradDivide
            return kind(comm, boundary.axes)
        case AllGatherStep() | SliceStep():
            grad_axes = boundary.grad_axes if training else None
            return _resharding(boundary, comm, grad_axes, boundary.local_grad_axes)
        case ReduceScatterStep():
            return _resharding(boundary, comm, () if training else None, ())
        case _:
            raise PlanError(f"{boundary.slot}: the step {boundary.op!r} is not allowed here")


def _resharding(
    boundary: ReshardingStep,
    comm: Communicator,
    grad_axes: tuple[int, ...] | None,
    local_grad_axes: tuple[int, ...],
) -> TensorStep:
    kind = _RESHARDING[type(boundary)]
    parts = open_parts(boundary.layout)
    if parts is not None:
        return Inner(kind, comm, boundary.dim, *parts, grad_axes, local_grad_axes)
    return kind(comm, boundary.dim, boundary.layout, grad_axes, local_grad_axes)


def in_use(steps: Iterable[Boundary], training: bool) -> list[Boundary]:
    """The steps to run: without training, those that change the gradient alone are left out."""
    return [b for b in steps if training or not isinstance(b, GRADIENT_STEPS)]
