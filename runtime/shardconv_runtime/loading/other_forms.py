"""Loading for training, and for sequence parallelism: the other forms of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..comm import mesh as launching
from ..comm.collectives import AllReduce, Communicator
from ..comm.mesh import Launch
from ..errors import PlanError
from ..format.plan import Plan
from ..format.plan_forms import of_sequence, require_training

if TYPE_CHECKING:
    from .load import Wanted


def require_form(plan: Plan, wanted: Wanted, *, stays_packed: bool) -> None:
    """Check that a plan has the wanted form.

    Raises:
        PlanError: it has not, or packed parameters are to stay so.
    """
    if stays_packed:
        raise PlanError(
            "packed weights are for inference, without sequence parallelism; pass dequantize=True"
        )
    if wanted.training:
        require_training(plan)
    if wanted.sequence_parallel:
        of_sequence(plan)


def connect(plan: Plan, wanted: Wanted, start: Launch, all_reduce: AllReduce | None) -> Communicator:
    """The process groups of all collectives that the wanted form of the model issues."""
    from ..training.backward_axes import backward_axes

    used = of_sequence(plan) if wanted.sequence_parallel else plan
    return launching.connect(used, start, all_reduce, backward_axes(used) if wanted.training else ())


def parallelize(model: nn.Module, plan: Plan, comm: Communicator, wanted: Wanted) -> None:
    """Make the model one rank's part of itself, in the wanted form, in place."""
    from ..training.prepare import parallelize_for_training

    parallelize_for_training(
        model,
        plan,
        comm,
        wanted.gather_logits,
        training=wanted.training,
        sequence_parallel=wanted.sequence_parallel,
    )
