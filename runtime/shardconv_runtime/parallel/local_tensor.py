"""The part of a global tensor in memory that a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor

from ..format.plan import ParameterPlan
from ..format.slices import Mesh, ranges
from ..format.stored_layout import holds_values


def local_tensor(entry: ParameterPlan, tensor: Tensor, mesh: Mesh, rank: int) -> Tensor:
    """What ``rank`` holds of a parameter in memory.

    Args:
        entry: the parameter's plan.
        tensor: global.
        mesh: of the plan.
        rank: the rank.

    Returns:
        local, contiguous; of a Partial parameter, zeros where a coordinate on its axes is not 0.
    """
    return local_view(entry, tensor, mesh, rank).to(getattr(torch, entry.dtype)).contiguous()


def local_view(entry: ParameterPlan, tensor: Tensor, mesh: Mesh, rank: int) -> Tensor:
    """The same in the dtype of ``tensor``, without a copy where it holds one span of each dim."""
    for index, dim in enumerate(entry.dims):
        spans = ranges(dim, mesh, rank)
        if spans != ((0, tensor.shape[index]),):
            pieces = [tensor.narrow(index, start, stop - start) for start, stop in spans]
            empty = tensor.narrow(index, 0, 0)
            tensor = torch.cat(pieces, index) if len(pieces) > 1 else next(iter(pieces), empty)
    return tensor if holds_values(entry, mesh, rank) else torch.zeros_like(tensor)
