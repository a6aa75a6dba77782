"""What a rank holds of the weights of an ordinary checkpoint, by a plan."""

from __future__ import annotations

from ..errors import SourceError
from ..format.layout_hash import holds_values
from ..format.plan import ParameterPlan, global_shape, local_shape
from ..format.slices import Mesh, ranges
from ..tensors import lazy_tensor as lazy
from ..tensors.lazy_tensor import LazyTensor


def as_planned(name: str, entry: ParameterPlan, tensor: LazyTensor) -> LazyTensor:
    """A weight of the plan's dtype."""
    if tensor.shape != global_shape(entry):
        raise SourceError(
            f"{name} is {list(tensor.shape)} in the checkpoint and {list(global_shape(entry))} "
            "in the plan; plan it again from the config.json that belongs to these weights"
        )
    cast = lazy.cast(tensor, entry.dtype)
    if cast is None:
        raise SourceError(f"{name} is cast to {tensor.dtype} when loaded, and {entry.dtype} in the plan")
    return cast


def shard(entry: ParameterPlan, tensor: LazyTensor, mesh: Mesh, rank: int) -> LazyTensor:
    """What ``rank`` holds of a parameter.

    Args:
        entry: the parameter's plan.
        tensor: global, of the plan's dtype.
        mesh: of the plan.
        rank: the rank.

    Returns:
        local; of a Partial parameter, zeros where a coordinate on its axes is not 0.
    """
    if not holds_values(entry, mesh, rank):
        return lazy.zeros(entry.dtype, local_shape(entry, mesh, rank))
    for index, dim in enumerate(entry.dims):
        tensor = lazy.take(tensor, index, ranges(dim, mesh, rank))
    return tensor
