"""The random state of rank 0 on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .mesh import Launch


def share_rng_state(start: Launch) -> None:
    """Continue on every rank with the random state of rank 0, so that all draw the same tokens."""
    if start.group is None:
        return
    torch.set_rng_state(_from_rank_0(torch.get_rng_state(), start))
    if start.device.type == "cuda":
        state = torch.cuda.get_rng_state(start.device)
        torch.cuda.set_rng_state(_from_rank_0(state, start), start.device)


def _from_rank_0(state: torch.Tensor, start: Launch) -> torch.Tensor:
    received = state.to(start.device)
    dist.broadcast(received, group_src=0, group=start.group)
    return received.cpu()
