"""all_gather of GPU tensors over gloo, through the memory of the host.

Ranks that share one GPU communicate over gloo, which sums CUDA tensors but does not gather them: torch's
functional all_gather becomes ``allgather_into_tensor_coalesced``, which gloo only has for CPUs, and the
process is aborted (https://github.com/pytorch/pytorch/issues/152645).
"""

from __future__ import annotations

import torch
from torch import Tensor

_functional = torch.ops._c10d_functional


# One operator, so that compiled code has no graph break and does not look into the copies.
@torch.library.custom_op("shardconv::host_gather", mutates_args=())
def host_gather(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """Gather contiguous local ``[n, ...]`` of all ranks of a group, in order, as ``[num_ranks * n, ...]``."""
    gathered = _functional.all_gather_into_tensor(x.cpu(), num_ranks, group_name)
    gathered_on_device: Tensor = _functional.wait_tensor(gathered).to(x.device)
    return gathered_on_device


@host_gather.register_fake
def _(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    return x.new_empty((x.shape[0] * num_ranks, *x.shape[1:]))
