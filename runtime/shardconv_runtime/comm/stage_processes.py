"""The processes of a pipeline: stages outermost, so that the ranks of a stage are neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LaunchError
from .mesh import Launch
from .process_groups import axes_group, control_group, needs_host, warm_up
from .stage_link import EarlyReceives, StageLink, Traffic


@dataclass(frozen=True)
class StageProcesses:
    """The place of this process among those of a pipeline."""

    ranks: Launch
    """The ranks of the process's stages, and this one among them."""
    link: StageLink
    """To the ranks of equal place on other stages; it knows the stages of this process."""


def stage_processes(start: Launch, count: int, tp: int, per_process: int = 1) -> StageProcesses:
    """Divide the processes of a launch into stages; every process calls it.

    Args:
        start: as many processes as there are ranks on all stages, or that number divided by ``per_process``.
        count: of stages, 2 or more.
        tp: ranks of each stage.
        per_process: stages of each process, which are as far from each other as there are processes.

    Raises:
        LaunchError: they cannot communicate, or would have to send from GPUs over gloo.
    """
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
    others = axes_group(start.group, column)
    warm_up([others], start.device)
    return StageProcesses(ranks, ProcessLink(place, count, others))


class ProcessLink(StageLink):
    """Sends between processes, one of each stage, or of several.

    Args:
        place: of this process among these.
        count: of stages.
        group: the processes, in order.
    """

    def __init__(self, place: int, count: int, group: dist.ProcessGroup) -> None:
        super().__init__(place, count, group.size())
        self.group = group
        self.sent_bytes = 0
        """So far, to other stages, results that are shared left out."""
        self.early: EarlyReceives | None = None

    def send(self, x: Tensor, stages: Sequence[int]) -> None:
        """Send to each stage; returns when the tensor may be changed."""
        if self.outbox is not None:
            self.outbox.append((x, tuple(stages)))
            return
        sends, x = self.outgoing, x.detach().contiguous()
        if sends is not None:
            x = x.clone()  # the model may change it before it is sent
        if self.early is not None:
            self.early.check(x)
        for stage in stages:
            if sends is None:
                dist.send(x, group=self.group, group_dst=stage % self.num_places)
            else:
                work = dist.isend(x, group=self.group, group_dst=stage % self.num_places)
                sends.append((stage, work, x))
            self.sent_bytes += x.nbytes

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
        """Wait for the next tensor of a stage."""
        if self.inbox is not None:
            return self.inbox.pop(0)
        if self.early is not None:
            return self.early.take(shape, dtype, source)
        found = torch.empty(tuple(shape), dtype=dtype, device=device)
        dist.recv(found, group=self.group, group_src=source % self.num_places)
        if self.received is not None:
            self.received.append((source, found))
        return found

    def receive_early(self, seen: Traffic, num_tokens: int, most_tokens: int, num_calls: int) -> None:
        """Over gloo, have buffers for the next calls."""
        if dist.get_backend(self.group) == "gloo":
            self.early = EarlyReceives(self.group, seen, num_tokens, most_tokens, num_calls)

    def stop_early(self) -> None:
        """Use up the buffers."""
        if self.early is not None:
            self.early.close()
            self.early = None

    def share(self, results: Sequence[Tensor]) -> None:
        """Broadcast each from the last stage.

        A loss may be in float32 there and in float64 on stages without logits, which only know that these are
        in float64: a number is sent in float64.
        """
        for result in results:
            is_number = not result.dim() and result.is_floating_point()
            whole = result.double() if is_number else result.contiguous()
            dist.broadcast(whole, group=self.group, group_src=self.num_places - 1)
            if not self.is_last and whole is not result:
                result.copy_(whole)
