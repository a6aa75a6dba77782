"""The stages of a pipeline, simulated one after another: each runs all calls before the next one begins."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from shardconv_runtime.comm.stage_link import StageLink
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.staged_names import held_by, num_stages
from shardconv_runtime.parallel.build import parallelize
from shardconv_runtime.parallel.fused_products import refresh_fused
from shardconv_runtime.parallel.stage_model import argument_names, keep_stage
from torch import Tensor, nn

from .rank_threads import RanksDisagree, ThreadCommunicator
from .simulated_weights import fill

Mail = dict[tuple[int, int, int], deque[Tensor]]
"""(rank among those of a stage, sender, receiver) -> tensors that were sent and not received."""


class MailLink(StageLink):
    """Leaves what it sends for stages that run later; results of the last stage go nowhere.

    Args:
        stage, count: of the pipeline.
        rank: among those of the stage.
        mail: of all stages.
    """

    def __init__(self, stage: int, count: int, rank: int, mail: Mail) -> None:
        super().__init__(stage, count)
        self._rank = rank
        self._mail = mail

    def send(self, x: Tensor, stages: Sequence[int]) -> None:
        """Leave a copy for each stage."""
        for stage in stages:
            self._mail.setdefault((self._rank, self.stage, stage), deque()).append(x.detach().clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
        """Take what was left first.

        Raises:
            RanksDisagree: nothing is there, or a tensor of another shape or dtype.
        """
        left = self._mail.get((self._rank, source, self.stage))
        if not left:
            raise RanksDisagree(f"stage {self.stage} waits for a tensor that stage {source} does not send")
        found = left.popleft()
        if tuple(found.shape) != tuple(shape) or found.dtype != torch.empty(0, dtype=dtype).dtype:
            raise RanksDisagree(
                f"stage {source} sends {found.dtype} {list(found.shape)}, stage {self.stage} expects {dtype} "
                f"{list(shape)}"
            )
        return found

    def share(self, results: Sequence[Tensor]) -> None:
        """Only those of the last stage are compared."""


def stage_of_rank(
    model: nn.Module,
    plan: Plan,
    comm: ThreadCommunicator,
    stage: int,
    weights: Mapping[str, Tensor],
    mail: Mail,
) -> nn.Module:
    """The model of one rank of a stage, on numbers.

    Args:
        model: unsharded, on meta; it is copied.
        plan: with stages.
        comm: this rank among those of the stage.
        stage: its number.
        weights: local ones of the rank, of all stages.
        mail: of the stages.
    """
    names = argument_names(model, plan)
    local = parallelize(copy.deepcopy(model), plan, comm)
    link = MailLink(stage, num_stages(plan), comm.rank, mail)
    keep_stage(local, plan, link, comm.rank, torch.device("cpu"), _dtype(model), names)
    fill(local, held_by(plan, stage, weights))
    refresh_fused(local)
    return local


def _dtype(model: nn.Module) -> torch.dtype:
    """Of a model whose floating point parameters have one."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
