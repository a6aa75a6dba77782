"""Criteria that end generation at the same step on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.mesh import Launch
from .deadline import progress


def criteria_of_rank_0(start: Launch) -> Callable[..., Any]:
    """A model's ``_get_stopping_criteria``, with rank 0 deciding on those that may differ between ranks."""

    def criteria(self: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers import StoppingCriteriaList, generation

        same_on_all_ranks = (
            generation.MaxLengthCriteria,
            generation.EosTokenCriteria,
            generation.StopStringCriteria,
            generation.ConfidenceCriteria,
        )

        class Steps(StoppingCriteriaList):  # type: ignore[misc]
            """Called once a step, whatever the way of generating."""

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                progress()
                return super().__call__(*args, **kwargs)

        found = type(self)._get_stopping_criteria(self, *args, **kwargs)
        return Steps(c if isinstance(c, same_on_all_ranks) else _DecidedByRank0(c, start) for c in found)

    return criteria


class _DecidedByRank0:
    """A criterion that may differ between ranks, such as one with a clock: rank 0 decides.

    Args:
        criterion: of transformers' form.
        start: the ranks.
    """

    def __init__(self, criterion: Callable[..., Any], start: Launch) -> None:
        self._criterion = criterion
        self._start = start

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """The sequences that are done, bool ``[B]``, from ``input_ids: [B, S]``; a broadcast of B bytes."""
        done = torch.zeros(input_ids.shape[0], dtype=torch.uint8, device=self._start.device)
        if self._start.rank == 0:
            done += torch.as_tensor(self._criterion(input_ids, scores, **kwargs)).to(done)
        dist.broadcast(done, group_src=0, group=self._start.group)
        return done.to(input_ids.device, torch.bool)
