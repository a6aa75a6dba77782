"""One rank of a llama without the others: random weights of its shapes, and collectives of its own.

The plan is solved here, and no file is written: the rank of a model of any size is ready in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.comm.collectives import Communicator, ProcessCommunicator
from shardconv_runtime.comm.mesh import Launch
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.inference.generation import prepare_generation
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import owner_of, parallelize, retie, stored_tensors
from synthetic import Shape
from torch import Tensor

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan

Connect = Callable[[Plan], Communicator]


class Alone(Communicator):
    """Collectives without other ranks: results have the right shapes and cost almost nothing."""

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return torch.cat([x] * self.num_ranks(axes))


class OneProcess(ProcessCommunicator):
    """The collectives of the plan in a process group of one process: the calls are real, the sums are not.

    Args:
        group: of this process alone.
    """

    def __init__(self, plan: Plan, group: Any, device: torch.device, all_reduce: Any = None) -> None:
        axes = tuple(range(len(plan.mesh)))
        every = [tuple(a for a in axes if mask >> a & 1) for mask in range(1, 1 << len(axes))]
        super().__init__(0, plan.mesh, dict.fromkeys(every, group), all_reduce, device)

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        # The group has one process where the plan has several ranks: each of them would send the same.
        gathered = self._gather(x, 1, axes)
        return torch.cat([gathered] * self.num_ranks(axes))


def lone_rank(
    shape: Shape,
    tp: int,
    directory: Path,
    connect: Connect,
    device: torch.device,
    dtype: torch.dtype,
    *,
    fuse: bool = True,
    rank: int = 0,
) -> Any:
    """Build a rank of ``tp``, with ``generate`` as it is in a job.

    Args:
        shape: of the model.
        tp: number of ranks.
        directory: for a config.json.
        connect: makes the communicator of rank 0 from the plan.
        device: where the weights are made.
        dtype: of the weights.
        fuse: compute the products of one input as one, as ``load(compile=True)`` does.
        rank: the rank, whose communicator ``connect`` makes.
    """
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "config.json").write_text(json.dumps({**shape.config(), "max_position_embeddings": 131072}))
    spec = resolve(directory, need_weights=False)
    plan = solve_plan(spec, SolveOptions(tp, check=False))
    if not fuse:
        plan = replace(plan, fused=())
    model = build_model(spec.model_class, spec.config, dtype)
    parallelize(model, plan, connect(plan))
    generator = torch.Generator(device).manual_seed(rank)
    for name, meta in list(stored_tensors(model)):
        owner, attribute = owner_of(model, name)
        weight = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        weight.normal_(0, 0.02, generator=generator)
        owner._parameters[attribute] = torch.nn.Parameter(weight, requires_grad=False)
    retie(model, plan)
    options = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    prepare_generation(model, options, Launch(0, 1, device), gather_logits=True)
    return model.to(device).eval()
