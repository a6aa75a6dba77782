"""What a rank holds of the weights of an ordinary checkpoint, by a plan."""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from ..blocks import stored_plans
from ..errors import SourceError
from ..layout_hash import holds_values
from ..plan import ParameterPlan, Plan, global_shape, local_shape
from ..slices import Mesh, ranges
from ..tensors import lazy
from ..tensors.copying import read_tensors
from ..tensors.lazy import LazyTensor
from ..tensors.windows import Windows

BATCH_BYTES = 1 << 28
"""Of tensors that are read at once; a larger tensor is read alone."""


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


def local_tensors(
    plan: Plan, weights: Mapping[str, LazyTensor], rank: int, device: torch.device
) -> Generator[tuple[str, Tensor]]:
    """What ``rank`` holds: for the CPU mapped if it lies in a local file as it is, else read, in batches.

    Args:
        plan: how each parameter is laid out.
        weights: global tensors by the names under which the plan stores them.
        rank: the rank.
        device: where the tensors go.

    Yields:
        Names and local tensors of the plan's dtypes.

    Raises:
        SourceError: a weight does not have the shape that the plan says, or cannot be read.
    """
    entries = stored_plans(plan)
    windows = Windows() if device.type == "cpu" else None
    batch: dict[str, LazyTensor] = {}
    num_bytes = 0
    for name, entry in entries.items():
        part = shard(entry, as_planned(name, entry, weights[name]), plan.mesh, rank)
        window = windows.window(part) if windows is not None else None
        if window is not None:
            yield name, window
            continue
        if batch and num_bytes + part.num_bytes > BATCH_BYTES:
            yield from _read(batch, device)
            batch, num_bytes = {}, 0
        batch[name] = part
        num_bytes += part.num_bytes
    yield from _read(batch, device)


def _read(batch: Mapping[str, LazyTensor], device: torch.device) -> Generator[tuple[str, Tensor]]:
    for name, tensor in zip(batch, read_tensors(list(batch.values())), strict=True):
        yield name, tensor.to(device)
