"""Receives that are begun before their tensors are known.

gloo sends nothing before the other process is ready to receive it, so that a tensor that is there long before
takes a round trip when it is asked for. It takes messages that are shorter than the buffer for them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ShardconvError


@dataclass(frozen=True)
class Traffic:
    """What one stage exchanged with others in one call.

    Attributes:
        sent, received: (stage, bytes) of each message, in order.
    """

    sent: tuple[tuple[int, int], ...]
    received: tuple[tuple[int, int], ...]


class EarlyReceives:
    """Buffers for the messages of the next calls, which have the same messages as one before.

    Args:
        group: the process of each stage, in order, over gloo.
        seen: what that call exchanged.
        num_tokens: of that call.
        most_tokens: of any call.
        num_calls: for which buffers are ready.
    """

    def __init__(
        self, group: dist.ProcessGroup, seen: Traffic, num_tokens: int, most_tokens: int, num_calls: int
    ) -> None:
        def most(messages: Sequence[tuple[int, int]]) -> int:
            largest = max((num_bytes for _, num_bytes in messages), default=0)
            return max(largest, math.ceil(largest / num_tokens * most_tokens))

        self._group = group
        self._most_sent, self._most_received = most(seen.sent), most(seen.received)
        self._num_ready = {stage: num_calls * n for stage, n in Counter(s for s, _ in seen.received).items()}
        self._num_expected = {stage: num_calls * n for stage, n in Counter(s for s, _ in seen.sent).items()}
        self._ready: dict[int, deque[tuple[Any, Tensor]]] = {stage: deque() for stage in self._num_ready}
        for stage, number in self._num_ready.items():
            for _ in range(number):
                self._prepare(stage)

    def _prepare(self, stage: int) -> None:
        buffer = torch.empty(self._most_received, dtype=torch.uint8)
        self._ready[stage].append((dist.irecv(buffer, group=self._group, group_src=stage), buffer))

    def check(self, x: Tensor) -> None:
        """Check that the other side has room for a tensor.

        Raises:
            ShardconvError: it has not.
        """
        if x.nbytes > self._most_sent:
            raise ShardconvError(
                f"a call of the model sends {x.nbytes} bytes to another stage, which expects calls of "
                f"continuous batching with at most {self._most_sent}; stop the manager first"
            )

    def take(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> Tensor:
        """The next tensor of a stage; waits for it."""
        work, buffer = self._ready[stage].popleft()
        self._prepare(stage)
        work.wait()
        return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Use up all buffers; all stages call this after the same call."""
        nothing = torch.zeros(1, dtype=torch.uint8)
        sends = [
            dist.isend(nothing, group=self._group, group_dst=stage)
            for stage, number in self._num_expected.items()
            for _ in range(number)
        ]
        for queue in self._ready.values():
            for work, _ in queue:
                work.wait()
        for send in sends:
            assert send is not None, "this process is in the group"
            send.wait()
