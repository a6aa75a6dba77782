"""What the ranks of all stages tell each other while requests are answered, some steps ahead of each other.

Rank 0 decides on each step and tells the others, which report to it; it waits for what they reported some
steps ago. The last stage sends the tokens that it chose to the earlier ones. All of it goes over gloo: it is
needed on the hosts.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.mesh import Launch
from ..comm.process_groups import PATIENT_TIMEOUT_S
from .step_coordinator import TELL_S, StepCoordinator, checksum

_DECISION, _REPORT, _PAYLOAD, _TOKENS = range(2**30, 2**30 + 4)
"""Tags of messages; torch counts from 0 for the barrier of transformers' ``pause``."""

_NONE = -(2**40)
"""In place of a random state, by ranks that draw no tokens: less than any."""


@dataclass(frozen=True)
class Message:
    """A message that is being sent or received."""

    work: Any
    content: Tensor

    def wait(self, timeout: timedelta) -> Tensor:
        """Its content, when it has come, or may be changed."""
        self.work.wait(timeout)
        return self.content


class StageCoordinator(StepCoordinator):
    """transformers' view of the ranks of all stages.

    Args:
        start: the ranks of all stages.
        timeout_s: how long a message may take; None for a month.
        draws: this rank draws random numbers for its tokens.
        most_steps: that are in flight at a time, 1 or more.
    """

    def __init__(self, start: Launch, timeout_s: float | None, *, draws: bool, most_steps: int) -> None:
        super().__init__(start, timeout_s, draws)
        self._timeout = timedelta(seconds=PATIENT_TIMEOUT_S if timeout_s is None else timeout_s)
        self._most_steps = most_steps
        self._others = range(1, start.world_size) if start.rank == 0 else (0,)
        self._num_steps = self._paused = 0
        """And the step at which all ranks paused last."""
        self._expected: dict[int, Message] = {}
        self._sent: deque[list[Message]] = deque()

    # Each step ------------------------------------------------------------------------------------------

    def tp_all_reduce_state(
        self, payload_size: int, stop_status: int, pause_requested: int = 0
    ) -> tuple[int, ...]:
        """Once for each step: the largest of each number, of rank 0 now, and of what others reported.

        Raises:
            LaunchError: a rank failed or ended, or the random states of those that draw differ.
        """
        state = checksum(self._start.device) if self._is_sampling else None
        states = [_NONE, _NONE] if state is None else [state, -state]
        numbers = torch.tensor([payload_size, stop_status, int(pause_requested), *states, 0])
        return self._agreed(self._or_lost(lambda: self._exchanged(numbers)))

    def _exchanged(self, numbers: Tensor) -> list[int]:
        if not self._num_steps:
            self._expect(self._others)
        self._num_steps += 1
        if self._start.rank:
            self._send(numbers, _REPORT)
            decision = self._next(0)
        else:
            reports = [] if self._num_steps < self._most_steps else [self._next(r) for r in self._others]
            if self._num_steps - self._most_steps < self._paused:
                for report in reports:
                    report[2] = 0  # the pause that it asked for has been
            decision = torch.stack([numbers, *reports]).amax(0)
            if decision[2]:
                self._paused = self._num_steps
            self._send(decision, _DECISION)
        found: list[int] = decision.tolist()
        return found

    def _agreed(self, found: list[int]) -> tuple[int, ...]:
        if found[3] == _NONE:  # nobody draws
            found[3:5] = [0, 0]
        return super()._agreed(found)

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """Requests of rank 0, on every rank; rank 0 does not wait."""
        return self._or_lost(lambda: self._requests(obj))

    def _requests(self, obj: Any) -> Any:
        if self._start.rank:
            size = self._receive(torch.zeros(1, dtype=torch.int64), 0, _PAYLOAD).wait(self._timeout)
            message = self._receive(torch.zeros(int(size), dtype=torch.uint8), 0, _PAYLOAD)
            return pickle.loads(message.wait(self._timeout).numpy().tobytes())
        content = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        self._send(torch.tensor([content.numel()]), _PAYLOAD)
        self._send(content, _PAYLOAD)
        return obj

    def close(self) -> None:
        """The loop has ended, on all ranks after the same step: no message is left behind."""
        self._or_lost(self._close)

    def _close(self) -> None:
        last = torch.tensor([0, 0, 0, _NONE, _NONE, 0])
        self._send(last, _REPORT if self._start.rank else _DECISION)
        if not self._start.rank:
            for _ in range(min(self._num_steps, self._most_steps - 1)):
                self._agreed(torch.stack([self._next(r) for r in self._others]).amax(0).tolist())
        for message in self._expected.values():
            message.wait(self._timeout)
        self._forget_sent(0)
        self._expected, self._num_steps, self._paused = {}, 0, 0

    def tell_failure(self) -> None:
        """Have the others raise at their next step, if they have not heard of it."""
        if self._heard_of_failure:
            return
        numbers = torch.tensor([0, 0, 0, _NONE, _NONE, self._start.rank + 1])
        try:
            for message in self._send(numbers, _REPORT if self._start.rank else _DECISION):
                message.wait(timedelta(seconds=TELL_S))
        except RuntimeError:  # they ended, or are inside of a step
            return

    # Tokens ---------------------------------------------------------------------------------------------

    def send_tokens(self, tokens: Tensor, ranks: Sequence[int]) -> list[Message]:
        """Begin to send what the last stage chose: int32, on the CPU."""
        return [self._deliver(tokens, rank, _TOKENS) for rank in ranks]

    def receive_tokens(self, shape: Sequence[int], rank: int) -> Message:
        """Begin to receive them from a rank of the last stage."""
        return self._receive(torch.zeros(tuple(shape), dtype=torch.int32), rank, _TOKENS)

    def await_message(self, message: Message) -> Tensor:
        """Its content.

        Raises:
            LaunchError: another rank ended, or did not answer.
        """
        content: Tensor = self._or_lost(lambda: message.wait(self._timeout))
        return content

    # Messages -------------------------------------------------------------------------------------------

    def _send(self, content: Tensor, tag: int) -> list[Message]:
        sent = [self._deliver(content, rank, tag) for rank in self._others]
        self._sent.append(sent)
        self._forget_sent(4 * self._most_steps)
        return sent

    def _forget_sent(self, most: int) -> None:
        """Wait for what was sent before the last ``most`` messages, which all have come by now."""
        while len(self._sent) > most:
            for message in self._sent.popleft():
                message.wait(self._timeout)

    def _expect(self, ranks: Sequence[int]) -> None:
        """Be ready for the next message of each rank: gloo sends none before."""
        tag = _DECISION if self._start.rank else _REPORT
        for rank in ranks:
            self._expected[rank] = self._receive(torch.zeros(6, dtype=torch.int64), rank, tag)

    def _next(self, rank: int) -> Tensor:
        content = self._expected[rank].wait(self._timeout)
        self._expect([rank])
        return content

    def _receive(self, content: Tensor, rank: int, tag: int) -> Message:
        return Message(dist.irecv(content, group=self.cpu_comm_group, group_src=rank, tag=tag), content)

    def _deliver(self, content: Tensor, rank: int, tag: int) -> Message:
        return Message(dist.isend(content, group=self.cpu_comm_group, group_dst=rank, tag=tag), content)
