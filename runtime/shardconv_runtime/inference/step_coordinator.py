"""What the ranks tell each other while transformers' continuous batching runs: requests, sizes, the end.

The loop runs in a thread of its own, with a process group of its own: the control messages of another thread
must not come between its messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Imports seconds of code, and is itself imported where a manager is made.
from transformers.generation.continuous_batching.distributed import DistributedHelper

from ..comm.agreement import agree, exchange
from ..comm.mesh import Launch
from ..comm.process_groups import loop_group
from ..errors import LaunchError
from .lost_ranks import raise_lost_rank

TELL_S = 5
"""How long a rank whose loop failed waits for the others to hear of it: some may be inside of a collective of
the model, and hear of it when this process ends."""


class StepCoordinator(DistributedHelper):  # type: ignore[misc]
    """transformers' view of the ranks of one model: rank 0 has the requests, all take the same steps.

    Args:
        start: the ranks; more than one.
        timeout_s: how long a message may take; None for a month.
        is_sampling: the steps draw random numbers.
    """

    def __init__(self, start: Launch, timeout_s: float | None, is_sampling: bool) -> None:
        super().__init__(None, timeout_s)
        assert start.group is not None, "several ranks have one"
        self._start = start
        self._is_sampling = is_sampling
        self.tp_size = start.world_size
        self.tp_group = start.group
        self.tp_local_rank = start.rank
        self.tp_root_global_rank = dist.get_global_rank(start.group, 0)
        self.is_tp_driver = start.rank == 0
        self.cpu_comm_group = loop_group(start.group, timeout_s)
        self._heard_of_failure = False

    def destroy_cpu_comm_group(self) -> None:
        """Nothing: the group is kept for the next manager of these ranks."""

    def tp_all_reduce_state(
        self, payload_size: int, stop_status: int, pause_requested: int = 0
    ) -> tuple[int, ...]:
        """Once for each step: the largest of each number over ranks, as many as transformers expects.

        Raises:
            LaunchError: a rank failed or ended, or the ranks' random states differ.
        """
        state = checksum(self._start.device) if self._is_sampling else 0
        numbers = torch.tensor([payload_size, stop_status, int(pause_requested), state, -state, 0])
        return self._agreed(self._or_lost(lambda: _largest(numbers, self.cpu_comm_group)))

    def _agreed(self, found: list[int]) -> tuple[int, ...]:
        """What transformers wants to know of the largest numbers."""
        if failed := found[5]:
            self._heard_of_failure = True
            raise LaunchError(f"rank {failed - 1} failed while it answered requests; its own output says why")
        if found[3] != -found[4]:
            self._heard_of_failure = True
            raise LaunchError(
                "the ranks' random states differ: on one of them, other code drew numbers from torch's "
                "default generator while requests were sampled; give that code a generator of its own"
            )
        return tuple(found[: len(self._cpu_int_acc)])

    def tell_failure(self) -> None:
        """Have the others raise at their next step, if they have not heard of it."""
        if self._heard_of_failure:
            return
        numbers = torch.tensor([0, 0, 0, 0, 0, self._start.rank + 1])
        try:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, self.cpu_comm_group, async_op=True)
            work.wait(timedelta(seconds=TELL_S))
        except RuntimeError:  # they ended, or are inside of a step
            return

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """Requests of rank 0, on every rank."""
        return self._or_lost(lambda: DistributedHelper.tp_broadcast_object_from_rank_0(self, obj))

    def tp_all_reduce_min(self, value: Tensor, on_cpu: bool = False) -> Tensor:
        """Sizes of the cache, before the loop runs; an error of one rank is raised on all."""
        agree(self._start, None)
        sizes = exchange(self._start, value.tolist())
        return value.copy_(torch.tensor(sizes).amin(0))

    def set_tp_seed(self, seed: int | None, model_device: torch.device) -> None:
        """Seed torch with a number of rank 0."""
        agree(self._start, None)
        mine = int(torch.randint(2**62, ())) if seed is None else seed
        torch.manual_seed(exchange(self._start, mine)[0])

    def _or_lost(self, message: Callable[[], Any]) -> Any:
        try:
            return message()
        except RuntimeError as error:
            self._heard_of_failure = True
            raise_lost_rank(error, self._start)
            raise


def _largest(numbers: Tensor, group: dist.ProcessGroup) -> list[int]:
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
    found: list[int] = numbers.tolist()
    return found


def checksum(device: torch.device) -> int:
    """Of the random state from which tokens are drawn."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return zlib.crc32(state.numpy().tobytes())
