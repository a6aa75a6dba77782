"""Norms of gradients, of which some are the same on all ranks (norms of queries and keys) and some are parts.

Elsewhere a sum over ranks counted the shared ones once for each rank, or gradients were not scaled at all.
https://github.com/NVIDIA-NeMo/RL/pull/3788, https://github.com/huggingface/transformers/pull/46113
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_causal
from one_and_ranks import of_one, of_ranks, require_same
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 93, 2]])


def backward(model: Any) -> list[Tensor]:
    """Parameters after a backward pass."""
    model(IDS, labels=IDS).loss.backward()
    return list(model.parameters())


def shared(model: Any) -> Tensor:
    """What is left of gradients that all ranks have."""
    return torch.cat([p.grad.double() for n, p in model.named_parameters() if n.endswith("norm.weight")])


def of_all(model: Any) -> Tensor:
    norm = torch.nn.utils.clip_grad_norm_(backward(model), 0.1)
    return torch.cat((norm.double().reshape(1), shared(model)))


def of_shared_ones(model: Any) -> Tensor:
    backward(model)
    chosen = [p for n, p in model.named_parameters() if "q_norm" in n or "k_norm" in n]
    norm = torch.nn.utils.clip_grad_norm_(chosen, 0.01)
    return torch.cat((norm.double().reshape(1), shared(model)))


def of_groups(model: Any) -> Tensor:
    parameters = backward(model)
    norms = [torch.nn.utils.clip_grad_norm_(parameters[i::3], 0.1) for i in range(3)]
    return torch.cat((torch.stack(norms).double(), shared(model)))


def one_by_one(model: Any) -> Tensor:
    norms = [torch.nn.utils.clip_grad_norm_(p, 0.1) for p in backward(model)]
    return torch.cat((torch.stack(norms).double(), shared(model)))


def in_two_steps(model: Any) -> Tensor:
    parameters = backward(model)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], 1.0)
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
    return torch.cat((norm.double().reshape(1), shared(model)))


def largest(model: Any) -> Tensor:
    norm = torch.nn.utils.clip_grad_norm_(backward(model), 0.1, float("inf"))
    return torch.cat((norm.double().reshape(1), shared(model)))


USES = (of_all, of_shared_ones, of_groups, one_by_one, in_two_steps, largest)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted for two ranks into "out"."""
    root = tmp_path_factory.mktemp("qwen3")
    shardconv.convert(save_causal("qwen3", root / "model"), root / "out", tp=2, sequence_parallel=True)
    return root


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_are_those_of_one_process(qwen3: Path, sequence_parallel: bool) -> None:
    ranks = of_ranks(qwen3 / "out", USES, training=True, sequence_parallel=sequence_parallel)
    require_same(USES, of_one(qwen3 / "model", USES, training=True), ranks, 1e-5)
