"""Simulate the stages of a pipeline one after another. Each stage runs all calls before the next one
begins."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.stage_names import absent_modules, held_by, held_names, num_stages
from shardconv_runtime.parallel.build import parallelize
from shardconv_runtime.parallel.fused_products import refresh_fused
from shardconv_runtime.pp.stage_link import Crossing, Handover, StageLink, Transport
from shardconv_runtime.pp.stage_model import argument_names, keep_stage
from shardconv_runtime.training.prepare import TrainingForm, parallelize_for_training
from torch import Tensor, nn

from ..inputs.trace_inputs import TraceInputs
from .model_runs import Precision, gradients_of
from .random_weights import fill
from .rank_threads import RanksDisagree, ThreadCommunicator

Mail = dict[tuple[int, int, int], deque[Tensor]]
"""(rank within a stage, sending stage, receiving stage) -> tensors that were sent and not yet received."""


class MailTransport(Transport):
    """Keep tensors for stages that run later. Results of the last stage are dropped."""

    def __init__(self, stage: int, rank: int, mail: Mail) -> None:
        self._stage = stage
        self._rank = rank
        self._mail = mail

    def send(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        """Keep a copy for each receiving stage."""
        for stage in stages:
            self._mail.setdefault((self._rank, self._stage, stage), deque()).append(x.detach().clone())

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Take the oldest tensor from a stage."""
        left = self._mail.get((self._rank, source, self._stage))
        if not left:
            raise RanksDisagree(f"stage {self._stage} waits for a tensor that stage {source} does not send")
        tensor = left.popleft()
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != torch.empty(0, dtype=dtype).dtype:
            raise RanksDisagree(
                f"stage {source} sends {tensor.dtype} {list(tensor.shape)}, stage {self._stage} expects "
                f"{dtype} {list(shape)}"
            )
        return tensor

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Drop the results; the last stage's own results are compared."""


def stage_of_rank(
    model: nn.Module,
    plan: Plan,
    comm: ThreadCommunicator,
    stage: int,
    weights: Mapping[str, Tensor],
    transport: Transport,
    *,
    training: bool = False,
) -> nn.Module:
    """Build the model of one rank of a stage, on numbers."""
    names, local = argument_names(model, plan), copy.deepcopy(model)
    if training:
        absent = absent_modules(plan, stage)
        parallelize_for_training(local, plan, comm, TrainingForm(gather_logits=True), absent=(absent,))
    else:
        parallelize(local, plan, comm)
    link = StageLink(stage, num_stages(plan), transport)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    keep_stage(local, plan, link, comm.rank, torch.device("cpu"), dtype, names)
    fill(local, held_by(plan, stage, weights), gradients=training)
    refresh_fused(local)
    return local


def gradients_of_stages(
    model: nn.Module,
    plan: Plan,
    comm: ThreadCommunicator,
    weights: Mapping[str, Tensor],
    inputs: TraceInputs,
    precision: Precision,
) -> dict[str, Tensor]:
    """Return the gradients of one rank's parameters in all stages, by the first of their names.

    A tied parameter that several stages hold gets the sum of its gradients.
    """
    handover, stages = Handover({}), range(num_stages(plan))
    models = [stage_of_rank(model, plan, comm, stage, weights, handover, training=True) for stage in stages]

    def run(**arguments: Any) -> Any:
        for local in models[:-1]:
            local.train()(**arguments)
        return models[-1](**arguments)

    gradients = gradients_of(models[-1], inputs, precision, run)
    names_of_stage = [held_names(plan, stage) for stage in stages]
    total: dict[str, Tensor] = {}
    for local, names in zip(models, names_of_stage, strict=True):
        gradients = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        for first, name in names.items():
            if name in gradients:
                total[first] = total[first] + gradients[name] if first in total else gradients[name]
    return total
