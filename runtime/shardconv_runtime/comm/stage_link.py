"""How the stages of a pipeline hand tensors on: a rank talks to the ranks of equal place on other stages."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ShardconvError

# Receives that are begun before their tensors are known.
#
# gloo sends nothing before the other process is ready to receive it, so that a tensor that is there long
# before takes a round trip when it is asked for. It takes messages that are shorter than the buffer for
# them.


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


Crossing = tuple[str, int]
"""A value that other stages need: the FQN of the module that returns it, and its place among its results."""


class Handover:
    """What one pass of a stage takes from the stages before it, and leaves for those behind it, while another
    one than the stage itself sends and receives.

    Args:
        received: local tensors of the stages before.
    """

    takes_all = False
    """Whether a pass takes what its own stage makes, too."""

    def __init__(self, received: Mapping[Crossing, Tensor]) -> None:
        self.values = dict(received)

    def take(
        self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A value that was received.

        Raises:
            ShardconvError: it was not, or has another form.
        """
        found = self.values.get(crossing)
        if found is None or tuple(found.shape) != tuple(shape) or found.dtype != dtype:
            raise ShardconvError(
                f"{crossing[0]}, of another stage, is called otherwise than in the first microbatch; give "
                "all microbatches the same arguments, in the same shapes"
            )
        return found

    def leave(self, crossing: Crossing, x: Tensor) -> None:
        """Leave a value for other stages.

        Raises:
            ShardconvError: there is one already.
        """
        if crossing in self.values:
            raise ShardconvError(
                f"{crossing[0]} is called more than once, and another stage needs its results: such a model "
                "cannot be trained in stages; convert it without --pp"
            )
        self.values[crossing] = x


class StageLink(ABC):
    """The place of one rank in a pipeline.

    All stages run the same code, so that each tensor is sent and received at the same point of it.

    Args:
        place: of this rank among those of equal place in their stages; with one stage each, its stage.
        count: of stages.
        num_places: how many ranks share the stages, in turn; by default each has one.
    """

    def __init__(self, place: int, count: int, num_places: int | None = None) -> None:
        self.place = place
        self.count = count
        self.num_places = count if num_places is None else num_places
        self.stages = tuple(range(place, count, self.num_places))
        """Of this rank."""
        self.stage = self.stages[-1]
        """The one of them whose pass is running."""
        self.depth = 0
        """How many calls are running in which all stages take part: of the model, or of ``generate``."""
        self.handed_on: set[Crossing] = set()
        """What this rank sent or received in the running call of the model."""
        self.handover: Handover | None = None
        """Set while a schedule of microbatches sends and receives in place of the running calls."""
        self.shares_results = True
        """Whether each call of the model gives its results to all stages; else only the last one has them."""
        self.outgoing: list[tuple[int, Any, Tensor]] | None = None
        """Where whoever set this to a list finds what ``send`` has begun: stage, work, tensor; None: it waits
        itself."""
        self.received: list[tuple[int, Tensor]] | None = None
        """Where whoever set this to a list finds what came from which stage."""
        self.inbox: list[Tensor] | None = None
        """What came before the call, in which ``receive`` takes it from here; None: it waits for it."""
        self.outbox: list[tuple[Tensor, tuple[int, ...]]] | None = None
        """Where ``send`` leaves what is to be sent after the call, and to which stages; None: it sends it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a model talks to the same stages."""
        return self

    @property
    def is_last(self) -> bool:
        """Whether the model's results are computed here."""
        return self.stage == self.count - 1

    def is_scheduled(self) -> bool:
        """Whether a schedule sends and receives in place of the running calls."""
        return self.handover is not None

    @property
    def is_measuring(self) -> bool:
        """Whether the running pass only finds the forms of what it takes, and computes nothing."""
        return self.handover is not None and self.handover.takes_all

    @contextmanager
    def passing(self, stage: int, handover: Handover) -> Iterator[None]:
        """Run a pass of one of this rank's stages, for which another one sends and receives.

        Args:
            stage: its number.
            handover: what the pass takes and leaves.
        """
        self.stage, self.handover = stage, handover
        self.shares_results, shared = False, self.shares_results
        try:
            yield
        finally:
            self.stage, self.handover, self.shares_results = self.stages[-1], None, shared

    def pass_on(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        """Give a result, local of any shape, to later stages."""
        self.handed_on.add(crossing)
        if self.handover is None:
            self.send(x, stages)
        else:
            self.handover.leave(crossing, x)

    def takes(self, stages: Sequence[int]) -> bool:
        """Whether this rank needs the value of a result that goes to these stages."""
        return self.stage in stages or self.is_measuring

    def take(
        self,
        crossing: Crossing,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        source: int,
    ) -> Tensor:
        """The result, of this (local) shape, that an earlier stage passes on next."""
        self.handed_on.add(crossing)
        if self.handover is not None:
            return self.handover.take(crossing, shape, dtype, device)
        return self.receive(shape, dtype, device, source)

    @abstractmethod
    def send(self, x: Tensor, stages: Sequence[int]) -> None:
        """Send a tensor, local of any shape, to later stages."""

    @abstractmethod
    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
        """The tensor of this (local) shape that an earlier stage sends next."""

    def receive_early(  # noqa: B027, a link may have nothing to do
        self, seen: Traffic, num_tokens: int, most_tokens: int, num_calls: int
    ) -> None:
        """Be ready for the next calls before they are made, where that is of use; all stages call this.

        Args:
            seen: what one call exchanged; each of the next ones has as many messages.
            num_tokens: of that call.
            most_tokens: of the next ones.
            num_calls: to be ready for.
        """

    def stop_early(self) -> None:  # noqa: B027
        """Receive as before; all stages call this after the same call."""

    @abstractmethod
    def share(self, results: Sequence[Tensor]) -> None:
        """Fill the results, of equal (local) shapes on all stages, with those of the last stage, in place."""
