"""Messages between the ranks of all stages while requests are answered, some steps ahead of each other.

Rank 0 decides on each step and tells the others, which report to it; it waits only for the reports of some
steps ago. The last stage sends the tokens that it chose to the earlier ones. All messages go over gloo, since
the hosts need them.
"""

from __future__ import annotations

import inspect
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.generation.continuous_batching.distributed import DistributedHelper

from ..errors import LaunchError, RanksTimeoutError
from .agreement import agree, exchange
from .deadline import raise_lost_rank
from .mesh import Launch
from .process_groups import PATIENT_TIMEOUT_S, loop_group

# Messages between the ranks while transformers' continuous batching runs: requests, sizes, the end.
#
# The loop runs in its own thread, with its own process group: the control messages of another
# thread must not come between its messages.

TELL_S = 5
"""How long a rank whose loop failed waits for the others to hear of it: some may be inside of a collective of
the model, and hear of it when this process ends."""


_NUM_STATES = len(inspect.signature(DistributedHelper.tp_all_reduce_state).parameters) - 1
"""Numbers that the installed transformers expects back; 5.17 has no pause."""


class StepCoordinator(DistributedHelper):  # type: ignore[misc]
    """transformers' view of the ranks of one model: rank 0 has the requests, all take the same steps."""

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
        self.has_disagreed = False
        """Another rank failed to make its cache, and this one knows: it must not tell that once more."""

    def destroy_cpu_comm_group(self) -> None:
        """Do nothing: the group is kept for the next manager of these ranks."""

    def tp_all_reduce_state(
        self, payload_size: int, stop_status: int, pause_requested: int = 0
    ) -> tuple[int, ...]:
        """Return the largest of each number over ranks, once for each step, as transformers expects."""
        state = checksum(self._start.device) if self._is_sampling else 0
        numbers = torch.tensor([payload_size, stop_status, int(pause_requested), state, -state, 0])
        return self._agreed(self._or_lost(lambda: _largest(numbers, self.cpu_comm_group)))

    def _agreed(self, found: list[int]) -> tuple[int, ...]:
        """Return the part of the largest numbers that transformers expects."""
        if failed := found[5]:
            self._heard_of_failure = True
            raise RanksTimeoutError(
                f"rank {failed - 1} failed while it answered requests; its own output says why"
            )
        if found[3] != -found[4]:
            self._heard_of_failure = True
            raise LaunchError(
                "the ranks' random states differ: on one of them, other code drew numbers from torch's "
                "default generator while requests were sampled; give that code its own generator"
            )
        return tuple(found[:_NUM_STATES])

    def tell_failure(self) -> None:
        """Let the other ranks raise at their next step, unless they know already."""
        if self._heard_of_failure:
            return
        numbers = torch.tensor([0, 0, 0, 0, 0, self._start.rank + 1])
        try:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, self.cpu_comm_group, async_op=True)
            work.wait(timedelta(seconds=TELL_S))
        except RuntimeError:  # they ended, or are inside of a step
            return

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """Return requests of rank 0, on every rank."""
        return self._or_lost(lambda: DistributedHelper.tp_broadcast_object_from_rank_0(self, obj))

    def tp_all_reduce_min(self, value: Tensor, on_cpu: bool = False) -> Tensor:
        """Return the smallest sizes of the cache, before the loop runs; all ranks raise the error of one."""
        self._agree()
        sizes = exchange(self._start, value.tolist())
        return value.copy_(torch.tensor(sizes).amin(0))

    def set_tp_seed(self, seed: int | None, model_device: torch.device) -> None:
        """Seed torch with a number of rank 0."""
        self._agree()
        mine = int(torch.randint(2**62, ())) if seed is None else seed
        torch.manual_seed(exchange(self._start, mine)[0])

    def _agree(self) -> None:
        """Go on if no rank has failed while its cache was made."""
        try:
            agree(self._start, None)
        except LaunchError:
            self.has_disagreed = True
            raise

    def _or_lost(self, message: Callable[[], Any]) -> Any:
        try:
            return message()
        except RuntimeError as error:
            self._heard_of_failure = True
            raise_lost_rank(error, self._start)
            raise


def _largest(numbers: Tensor, group: dist.ProcessGroup) -> list[int]:
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
    maxima: list[int] = numbers.tolist()
    return maxima


def checksum(device: torch.device) -> int:
    """Return a checksum of the random state from which tokens are drawn."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return zlib.crc32(state.numpy().tobytes())


_DECISION, _REPORT, _PAYLOAD, _TOKENS = range(2**30, 2**30 + 4)
"""Tags of messages; torch counts from 0 for the barrier of transformers' ``pause``."""

_NONE = -(2**40)
"""Number that ranks without draws send in place of a random state; it is less than any state."""


@dataclass(frozen=True)
class Message:
    """A message that is being sent or received."""

    work: Any
    content: Tensor

    def wait(self, timeout: timedelta) -> Tensor:
        """Return its content, when it has come, or may be changed."""
        self.work.wait(timeout)
        return self.content


class StageCoordinator(StepCoordinator):
    """transformers' view of the ranks of all stages."""

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
        """Return the largest of each number: rank 0's current one and the ones that other ranks reported."""
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
        decided: list[int] = decision.tolist()
        return decided

    def _agreed(self, found: list[int]) -> tuple[int, ...]:
        if found[3] == _NONE:  # nobody draws
            found[3:5] = [0, 0]
        return super()._agreed(found)

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """Return requests of rank 0, on every rank; rank 0 does not wait."""
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
        """End the loop on all ranks after the same step, so that no message is left behind."""
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
        """Let the other ranks raise at their next step, unless they know already."""
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
        """Begin to send the tokens of the last stage: int32, on the CPU."""
        return [self._deliver(tokens, rank, _TOKENS) for rank in ranks]

    def receive_tokens(self, shape: Sequence[int], rank: int) -> Message:
        """Begin to receive them from a rank of the last stage."""
        return self._receive(torch.zeros(tuple(shape), dtype=torch.int32), rank, _TOKENS)

    def await_message(self, message: Message) -> Tensor:
        """Return its content."""
        content: Tensor = self._or_lost(lambda: message.wait(self._timeout))
        return content

    # Messages -------------------------------------------------------------------------------------------

    def _send(self, content: Tensor, tag: int) -> list[Message]:
        sent = [self._deliver(content, rank, tag) for rank in self._others]
        self._sent.append(sent)
        self._forget_sent(4 * self._most_steps)
        return sent

    def _forget_sent(self, most: int) -> None:
        """Wait for messages before the last ``most`` ones, which have all arrived by now."""
        while len(self._sent) > most:
            for message in self._sent.popleft():
                message.wait(self._timeout)

    def _expect(self, ranks: Sequence[int]) -> None:
        """Prepare to receive the next message of each rank: gloo sends none before."""
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
