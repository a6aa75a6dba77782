"""Parameters that several processes hold for their stages, for example an embedding that is the head too.

Their gradients are summed. Gradients from stages of one process add up in its parameter by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.process_groups import axes_group
from ..format.plan import parameter_plans
from ..format.stage_names import held_names, stages_of
from ..loaded import loaded
from ..saving.local_windows import local_tensor
from ..saving.stored_model import named_tensors
from .stage_link import StageLink
from .stage_processes import ProcessTransport


class TiedGradients:
    """Sums the gradients of a step over the processes that hold a parameter; each of them makes one."""

    def __init__(self, model: nn.Module) -> None:
        source = loaded(model)
        link: StageLink = source.stage.link
        assert isinstance(link.transport, ProcessTransport), "it was loaded on processes"
        tensors = named_tensors(model)
        plan, num_places = source.plan, link.num_places
        names_of_place = [held_names(plan, stages_of(plan, place, num_places)) for place in range(num_places)]
        self._tied: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        for first in parameter_plans(plan):
            places = tuple(place for place, names in enumerate(names_of_place) if first in names)
            if len(places) < 2 or link.place not in places:
                continue
            tensor = tensors[names_of_place[link.place][first]]
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                self._tied.append((tensor, axes_group(link.transport.group, places)))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Sum the gradients of passes within this context, and add them to the earlier gradients."""
        before: list[Tensor | None] = [parameter.grad for parameter, _ in self._tied]
        for parameter, _ in self._tied:
            parameter.grad = None
        yield
        for (parameter, group), earlier in zip(self._tied, before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_tensor(parameter.grad), group=group)
            if earlier is not None:
                parameter.grad += earlier
