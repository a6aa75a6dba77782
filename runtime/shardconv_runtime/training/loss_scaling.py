"""``torch.amp.GradScaler`` of the gradients of loaded models: all ranks skip a step, or none does.

A scaler looks for infinities in the gradients that it is given. Each rank would look at its own part, so that
after an overflow in one rank's shard that rank skips the step, the others take it, and they go on with other
scales. All ways in which a scaler looks (``unscale_``, ``step``, also for fused optimizers) pass through a
private method of its class. In its place, one takes the largest answer of all processes of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from ..loaded import loaded
from .clipping import groups_of
from .models_in_parts import models_of

_FOUND = "_unscale_grads_"
"""The private method: it scales gradients, and returns for each device whether one of them was not finite."""


@cache
def look_for_infinities_over_ranks() -> None:
    """Let scalers of torch decide for all ranks of ``MODELS``."""
    for kind in (GradScaler, ShardedGradScaler):
        if _FOUND in vars(kind):
            setattr(kind, _FOUND, _over_ranks(vars(kind)[_FOUND]))


def _over_ranks(own: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
    @wraps(own)
    def unscaled(
        self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> dict[torch.device, Tensor]:
        found = own(self, optimizer, inv_scale, found_inf, *args, **kwargs)
        models = models_of(p for group in optimizer.param_groups for p in group["params"])
        if not models:
            return found
        if not found:  # this process has no gradients; the others do, and wait for it
            found[found_inf.device] = found_inf.clone()
        total = found_inf.new_zeros((), device=loaded(models[0]).launch.device)
        for value in found.values():
            total = torch.maximum(total, value.to(total.device).reshape(()))
        groups = {group.group_name: group for model in models for group in groups_of(model)}
        for name in sorted(groups):  # in the same order on all processes
            dist.all_reduce(total, dist.ReduceOp.MAX, groups[name])
        for value in found.values():
            value.copy_(total.expand_as(value))
        return found

    return unscaled
