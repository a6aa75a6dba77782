"""The device of this rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..errors import LaunchError
from . import env_int


def find_device(device: torch.device | str | None, num_local: int) -> torch.device:
    """The device of this process, with an index if it is a GPU.

    A GPU without an index is the one to which the process is bound, by ``torch.cuda.set_device`` or
    ``init_process_group(device_id=)``, else that of the launcher's local rank. Where a process sees one
    GPU, it is that: launchers may show each process its own.

    Args:
        device: as the caller named it; by default a GPU if torch finds cuda, else the CPU.
        num_local: this many processes of this host need a GPU each; 0 if unknown.

    Raises:
        LaunchError: there is no cuda, or there are fewer GPUs than processes.
    """
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type != "cuda" or (found.index is not None and torch.cuda.is_available()):
        return found
    if not torch.cuda.is_available():
        raise LaunchError(f"the model should be on {found}, but torch finds no cuda; pass device='cpu'")
    bound: int | None
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None and world.bound_device_id is not None:
        bound = world.bound_device_id.index
    else:  # GPU 0 may be current without having been chosen
        bound = torch.cuda.current_device() or None
    return torch.device("cuda", _index_of_local_rank(num_local) if bound is None else bound)


def _index_of_local_rank(num_local: int) -> int:
    count = torch.cuda.device_count()
    local = env_int("LOCAL_RANK", -1)
    if count == 1:
        return 0
    if local < 0:  # a launcher that fills one host after the other; duplicates are found once all have joined
        return env_int("RANK", 0) % count
    wanted = max(local + 1, num_local)
    if wanted > count:
        raise LaunchError(
            f"the launcher started {wanted} processes on this host, where {count} GPUs are visible, and each "
            f"rank needs its own GPU; start {count} processes per host (torchrun --nproc-per-node {count}), "
            "or pass device='cpu'"
        )
    return local
