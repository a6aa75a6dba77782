"""A rank's local part of the weights of an ordinary checkpoint, by a plan."""

from __future__ import annotations

from ..errors import SourceError
from ..format.plan import ParameterPlan, global_shape, local_shape
from ..format.slices import Mesh, ranges
from ..format.stored_layout import holds_values
from ..tensors.lazy_tensor import LazyTensor, cast, take, zeros


def as_planned(name: str, entry: ParameterPlan, tensor: LazyTensor) -> LazyTensor:
    """A global weight, cast to the plan's dtype.

    Args:
        name: FQN, for messages.
        entry: the parameter's plan.
        tensor: global, of the shape in the checkpoint.

    Raises:
        SourceError: the shape is not that of the plan, or the weight would be cast twice.
    """
    if tensor.shape != global_shape(entry):
        raise SourceError(
            f"{name} is {list(tensor.shape)} in the checkpoint and {list(global_shape(entry))} "
            "in the plan; plan it again from the config.json that belongs to these weights"
        )
    planned = cast(tensor, entry.dtype)
    if planned is None:
        raise SourceError(f"{name} is cast to {tensor.dtype} when loaded, and {entry.dtype} in the plan")
    return planned


def shard(entry: ParameterPlan, tensor: LazyTensor, mesh: Mesh, rank: int) -> LazyTensor:
    """The local part of a parameter on a rank.

    Args:
        entry: the parameter's plan.
        tensor: global, of the plan's dtype.
        mesh: of the plan.
        rank: the rank.

    Returns:
        Local; zeros for a Partial parameter if some coordinate of the rank on its axes is not 0.
    """
    if not holds_values(entry, mesh, rank):
        return zeros(entry.dtype, local_shape(entry, mesh, rank))
    for index, dim in enumerate(entry.dims):
        tensor = take(tensor, index, ranges(dim, mesh, rank))
    return tensor
