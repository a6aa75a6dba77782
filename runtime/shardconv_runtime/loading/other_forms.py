"""Loading for training, and for sequence parallelism: the other forms of a plan."""

from __future__ import annotations

from ..comm import mesh as launching
from ..comm.collectives import AllReduce, ProcessCommunicator
from ..comm.mesh import Launch
from ..errors import PlanError
from ..format.plan import Plan
from ..format.plan_forms import of_sequence, require_training

WITH_BACKWARD = frozenset({"bnb_4bit"})
"""Methods of packings whose modules give the gradients of their inputs."""


def require_form(
    plan: Plan,
    *,
    training: bool,
    sequence_parallel: bool,
    stays_packed: bool,
    in_parts: bool,
    adapted: bool = False,
) -> None:
    """Check that a plan has the wanted form.

    Args:
        plan: of the model.
        training: it is to have a backward pass.
        sequence_parallel: its activations are to be sharded over the sequence.
        stays_packed: packed parameters are to stay so.
        adapted: the model has adapters, which alone are trained.
        in_parts: each process is to read a part of a rank's tensors.

    Raises:
        PlanError: it has not that form, or has packed parameters that are in the way.
    """
    packings = sorted({entry.packing.method for entry in plan.parameters if entry.packing is not None})
    if stays_packed and not (adapted and not sequence_parallel and set(packings) <= WITH_BACKWARD):
        raise PlanError(
            f"packed weights ({', '.join(packings)}) are for inference, without sequence parallelism, and of "
            f"{', '.join(WITH_BACKWARD)} under adapters that are trained; pass dequantize=True"
        )
    if in_parts and packings:
        raise PlanError(
            f"data_parallel=: packed weights ({', '.join(packings)}) are dequantized as whole tensors of a "
            "rank; leave it out, and call shardconv_runtime.data_parallel afterwards; or convert the model "
            "with --dtype bfloat16"
        )
    if training:
        require_training(plan)
    if sequence_parallel:
        of_sequence(plan)


def connect(
    plan: Plan, start: Launch, all_reduce: AllReduce | None, *, training: bool, sequence_parallel: bool
) -> ProcessCommunicator:
    """The process groups of all collectives that the wanted form of the model issues."""
    from ..training.backward_axes import backward_axes

    used = of_sequence(plan) if sequence_parallel else plan
    return launching.connect(used, start, all_reduce, backward_axes(used) if training else ())
