"""The processes of a pipeline: stages outermost, so that the ranks of a stage are neighbors."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.mesh import Launch
from ..comm.process_groups import axes_group, control_group, needs_host, warm_up
from ..errors import LaunchError, ShardconvError
from .stage_link import Crossing, StageLink, Transport


@dataclass(frozen=True)
class StageProcesses:
    """The place of this process in a pipeline."""

    ranks: Launch
    """The ranks of the process's stages, and this one among them."""
    link: StageLink
    """The link to the ranks of equal place on other stages; it knows the stages of this process."""


def stage_processes(start: Launch, count: int, tp: int, per_process: int = 1) -> StageProcesses:
    """Divide the processes of a launch into stages; every process calls it."""
    assert start.group is not None, "several ranks have one"
    if needs_host(start.group, start.device):
        raise LaunchError(
            "stages of a pipeline send tensors from GPU to GPU, which gloo cannot do; start the process "
            "group with nccl and a GPU for each process, or pass device='cpu'"
        )
    place, rank = divmod(start.rank, tp)
    row = tuple(range(place * tp, (place + 1) * tp))
    column = tuple(range(rank, count // per_process * tp, tp))
    names = dist.get_process_group_ranks(start.group)
    if list(names) != sorted(names):
        raise LaunchError(f"the ranks of the given group must ascend, they are {list(names)}")
    ranks = replace(start, rank=rank, world_size=tp, group=None, control=None)
    if tp > 1:
        group = axes_group(start.group, row)
        control = control_group(start.group, tuple(names[number] for number in row))
        ranks = replace(ranks, group=group, control=control)
    other_group = axes_group(start.group, column)
    warm_up([other_group], start.device)
    transport = ProcessTransport(other_group, start.device)
    return StageProcesses(ranks, StageLink(place, count, transport, other_group.size()))


@dataclass(frozen=True)
class StageMessage:
    """A tensor that one stage sends to another, without its bytes."""

    crossing: Crossing
    stage: int
    """The other stage."""
    shape: tuple[int, ...]
    """Local."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Traffic:
    """The values that one stage exchanges with others in a call, in order."""

    sent: tuple[StageMessage, ...]
    received: tuple[StageMessage, ...]


class ProcessTransport(Transport):
    """Sends between processes, of one stage or of several, and waits."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._device = device
        self.sent_bytes = 0
        """So far, to other stages, results that are shared left out."""
        self._early: EarlyReceives | None = None

    def send(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        """Send to each stage; returns when the tensor may be changed."""
        x = x.detach().contiguous()
        self._count(x, stages)
        for stage in stages:
            dist.send(x, group=self.group, group_dst=stage % self.group.size())

    def begin_send(self, x: Tensor, stages: Sequence[int]) -> list[tuple[Any, Tensor]]:
        """Begin to send to each stage.

        Returns:
            The work to wait for at each stage, and a copy of the tensor, which is to be kept until then.
        """
        x = x.detach().contiguous().clone()  # the model may change it before it is sent
        self._count(x, stages)
        return [(dist.isend(x, group=self.group, group_dst=s % self.group.size()), x) for s in stages]

    def _count(self, x: Tensor, stages: Sequence[int]) -> None:
        if self._early is not None:
            self._early.check(x)
        self.sent_bytes += x.nbytes * len(stages)

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Wait for the next tensor of a stage."""
        if self._early is not None:
            return self._early.take(shape, dtype, source)
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        dist.recv(tensor, group=self.group, group_src=source % self.group.size())
        return tensor

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast each from the last stage.

        A loss may be in float32 there and in float64 on stages without logits, which only know that these are
        in float64: a number is sent in float64.
        """
        last = self.group.size() - 1
        for tensor in tensors:
            is_number = not tensor.dim() and tensor.is_floating_point()
            sent = tensor.double() if is_number else tensor.contiguous()
            dist.broadcast(sent, group=self.group, group_src=last)
            if self.group.rank() != last and sent is not tensor:
                tensor.copy_(sent)

    def receive_early(self, seen: Traffic, num_tokens: int, most_tokens: int, num_calls: int) -> None:
        """Prepare, over gloo, to receive in the next calls before they are made; all stages call this."""
        if dist.get_backend(self.group) == "gloo":
            self._early = EarlyReceives(self.group, seen, num_tokens, most_tokens, num_calls)

    def stop_early(self) -> None:
        """Use up the buffers, and receive as before; all stages call this after the same call."""
        if self._early is not None:
            self._early.close()
            self._early = None


class AsyncTransport(Transport):
    """Sends between processes without waiting, and records the messages."""

    def __init__(self, processes: ProcessTransport) -> None:
        self._processes = processes
        self._sent: list[StageMessage] = []
        self._received: list[StageMessage] = []
        self._sends: list[tuple[Any, Tensor]] = []

    def send(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        """Begin to send a copy to each stage."""
        self._sends += self._processes.begin_send(x, stages)
        self._sent += [StageMessage(crossing, stage, tuple(x.shape), x.dtype) for stage in stages]

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Wait for the next tensor of a stage."""
        tensor = self._processes.receive(crossing, shape, dtype, source)
        self._received.append(StageMessage(crossing, source, tuple(tensor.shape), tensor.dtype))
        return tensor

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast each from the last stage."""
        self._processes.share(tensors)

    @property
    def traffic(self) -> Traffic:
        """Return the messages that were exchanged so far."""
        return Traffic(tuple(self._sent), tuple(self._received))

    def wait(self) -> None:
        """Wait until all that was sent has gone."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()


# Receives that are begun before their tensors are known.
#
# gloo sends nothing before the other process is ready to receive it, so that a tensor that is there long
# before takes a round trip when it is asked for. It takes messages that are shorter than the buffer for
# them.


class EarlyReceives:
    """Buffers for the messages of the next calls, which have the same messages as one before."""

    def __init__(
        self, group: dist.ProcessGroup, seen: Traffic, num_tokens: int, most_tokens: int, num_calls: int
    ) -> None:
        def most(messages: Sequence[StageMessage]) -> int:
            largest = max((message.num_bytes for message in messages), default=0)
            return max(largest, math.ceil(largest / num_tokens * most_tokens))

        self._group = group
        self._most_sent, self._most_received = most(seen.sent), most(seen.received)
        num_sent, num_received = (Counter(m.stage for m in each) for each in (seen.sent, seen.received))
        self._num_ready = {stage: num_calls * n for stage, n in num_received.items()}
        self._num_expected = {stage: num_calls * n for stage, n in num_sent.items()}
        self._ready: dict[int, deque[tuple[Any, Tensor]]] = {stage: deque() for stage in self._num_ready}
        for stage, number in self._num_ready.items():
            for _ in range(number):
                self._prepare(stage)

    def _prepare(self, stage: int) -> None:
        buffer = torch.empty(self._most_received, dtype=torch.uint8)
        self._ready[stage].append((dist.irecv(buffer, group=self._group, group_src=stage), buffer))

    def check(self, x: Tensor) -> None:
        """Check that the other side has room for a tensor."""
        if x.nbytes > self._most_sent:
            raise ShardconvError(
                f"a call of the model sends {x.nbytes} bytes to another stage, which expects calls of "
                f"continuous batching with at most {self._most_sent}; stop the manager first"
            )

    def take(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> Tensor:
        """Wait for the next tensor of a stage."""
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
