"""Sums of small tensors in symmetric memory, in one step: ``load(all_reduce="symmetric")``.

Each rank copies its tensor to memory that the others can read, and adds up the tensors of all ranks in one
kernel. NCCL passes messages instead. All ranks read everything, so it pays for small tensors, as in decoding.
Every rank adds in the order of the ranks, and rounds alike: the sums have the same bits on all ranks. They
may differ from NCCL's, which adds in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

# Private, but documented, and the only way to memory that other GPUs can read.
from torch.distributed import _symmetric_memory

from ..errors import LaunchError, OptionError
from .collectives import AllReduce, ProcessCommunicator
from .mesh import Launch, can_capture

SYMMETRIC = "symmetric"
"""The name of these sums."""

MAX_BYTES = 128 << 10
"""Most bytes of a tensor that is summed in one step; torch's compiler has the same limit."""

ALIGNMENT = 16
"""A tensor's size in bytes must be a multiple of this, which the kernel reads at a time."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that the kernel supports."""

_shared: dict[str, tuple[dist.ProcessGroup, Tensor]] = {}
"""Groups by name, with memory that their ranks can read, ``[MAX_BYTES]`` uint8."""


def connect_by_name(
    name: str, start: Launch, connect: Callable[[AllReduce | None], ProcessCommunicator]
) -> ProcessCommunicator:
    """Return a communicator that sums as ``name`` says."""
    if name != SYMMETRIC:
        raise OptionError(f"all_reduce={name!r} should be {SYMMETRIC!r} or a function")
    comm = connect(symmetric_sum)
    if comm.groups:
        prepare_symmetric(start, comm.groups.values())
    return comm


def prepare_symmetric(start: Launch, groups: Iterable[dist.ProcessGroup]) -> None:
    """Allocate the memory; all members of a group call this at about the same time."""
    if not can_capture(start):
        raise LaunchError(
            f'all_reduce="symmetric" needs GPUs and nccl, and the model is on {start.device} in a group of '
            f"{dist.get_backend_config(start.group)}; leave it out"
        )
    try:
        for group in groups:
            prepared_group, _ = _shared.get(group.group_name, (None, None))
            if prepared_group is not group:
                _shared[group.group_name] = group, _shared_buffer(start.device, group)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise LaunchError(
            f'all_reduce="symmetric" needs GPUs that read each other\'s memory ({first}); leave it out'
        ) from error


def symmetric_sum(x: Tensor, group_name: str) -> Tensor:
    """Sum contiguous ``x`` of any shape over a group; an ``AllReduce``."""
    summed: Tensor = torch.ops.shardconv.symmetric_sum(x, group_name)
    return summed


# one operator for all sizes: compiled code does not depend on the size, and does not look into the buffer.
@torch.library.custom_op("shardconv::symmetric_sum", mutates_args=())
def _symmetric_sum(x: Tensor, group_name: str) -> Tensor:
    group, buffer = _shared[group_name]
    if x.dtype not in DTYPES or x.nbytes > MAX_BYTES or x.nbytes % ALIGNMENT:
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed
    # The kernel ends when all ranks have read, so that the next call may write.
    mine = buffer[: x.nbytes].view(x.dtype).view(x.shape)
    mine.copy_(x)
    result: Tensor = torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", group_name)
    return result


@_symmetric_sum.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(x)


def _shared_buffer(device: torch.device, group: dist.ProcessGroup) -> Tensor:
    buffer: Tensor = _symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)
    _symmetric_memory.rendezvous(buffer, group)
    return buffer
