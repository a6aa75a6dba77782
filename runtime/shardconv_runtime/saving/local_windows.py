"""The window of its rank's tensor that a process holds: a chunk if data-parallel processes share it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..errors import RefusedCallError
from ..format.plan import ParameterPlan
from ..format.slices import Mesh, Range, local_size


def chunk(span: Range, parts: int, part: int) -> Range:
    """Return a part of consecutive positions as in ``Shard`` and ``torch.chunk``; the last may be empty."""
    start, stop = span
    length = -(-(stop - start) // parts)
    begin = min(start + part * length, stop)
    return begin, min(begin + length, stop)


def local_window(name: str, parameter: Tensor) -> tuple[tuple[Range, ...], bool]:
    """Return the window of its rank's tensor that a process holds.

    Args:
        parameter: local, or a DTensor over data-parallel processes whose global shape is the rank's local
            shape.

    Returns:
        The window, one range of local positions for each dim, and whether this process is the first of those
        that hold it.
    """
    spans = [(0, size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return tuple(spans), True
    coordinates = parameter.device_mesh.get_coordinate()
    assert coordinates is not None, "this process is in its mesh"
    first = True
    for placement, parts, part in zip(
        parameter.placements, parameter.device_mesh.shape, coordinates, strict=True
    ):
        if type(placement) is Shard:
            spans[placement.dim] = chunk(spans[placement.dim], parts, part)
        elif isinstance(placement, Replicate):
            first = first and part == 0
        else:
            raise RefusedCallError(
                f"{name} is a DTensor placed as {placement}; only Shard and Replicate can be stored"
            )
    local = tuple(local_tensor(parameter).shape)
    if local != tuple(stop - start for start, stop in spans):
        raise RefusedCallError(f"{name} is a DTensor whose local shape {local} is not an even chunk of it")
    return tuple(spans), first


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that may be a DTensor over data-parallel processes.

    Args:
        tensor: any shape and dtype; returned unchanged if it is not a DTensor.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


LocalWindow = Sequence[Range]
"""Half-open local positions, one range for each dim."""


def full_window(entry: ParameterPlan, mesh: Mesh, rank: int) -> tuple[Range, ...]:
    """Return the window that covers a rank's tensor."""
    return tuple((0, local_size(dim, mesh, rank)) for dim in entry.dims)
