"""Parameters of all ranks, put together on rank 0."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..format.plan import ParameterPlan, global_shape, local_shape
from ..format.stored_layout import holds_values
from ..loaded import Loaded
from .adapter_saving import held_boxes


def why_not_gathered(model: nn.Module, source: Loaded) -> str:
    """Return why parameters cannot be put together from the parts of the ranks; empty if they can."""
    if source.stage is not None:
        return "the model has pipeline stages"
    if source.attached is not None:
        return "the model has adapters"
    if source.packed:
        return "the model's weights are packed; load it with dequantize=True"
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "FSDP has sharded the parameters"
    return ""


def gathered_on_rank_0(local: Tensor, entry: ParameterPlan, source: Loaded) -> Tensor:
    """Return all of a parameter on rank 0, and this rank's part on the others; every rank calls it.

    Args:
        local: this rank's part.
        entry: the parameter in the plan.
        source: of a model without stages.
    """
    plan, group = source.plan, source.launch.group
    if group is None:
        return local.clone()
    full = local.new_empty(global_shape(entry)) if source.rank == 0 else local
    for rank in range(plan.tp):
        if not holds_values(entry, plan.mesh, rank):
            continue  # of a term of a sum, the others have zeros
        part = (
            local.contiguous()
            if rank == source.rank
            else local.new_empty(local_shape(entry, plan.mesh, rank))
        )
        dist.broadcast(part, group_src=rank, group=group)
        for there, here in held_boxes(entry, plan.mesh, rank) if source.rank == 0 else ():
            full[there] = part[here]
    return full
