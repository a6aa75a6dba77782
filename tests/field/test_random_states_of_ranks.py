"""Ranks of one model that draw from different random states, and inputs that differ in their values only.

Elsewhere layer norms drifted apart over a training, and images were augmented once for each rank.
https://github.com/NVIDIA/Megatron-LM/pull/206,
https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/276
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import save_causal
from one_and_ranks import of_ranks, require_refused
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 8], [35, 8, 9, 7, 93, 2, 1]])
GPT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def step(model: Any) -> Tensor:
    loss: Tensor = model(IDS, labels=IDS).loss
    loss.backward()
    norms = [p.grad.flatten() for n, p in model.named_parameters() if "ln_f" in n]
    return torch.cat([loss.detach().reshape(1), *norms])


def seeded_alike(model: Any) -> Tensor:
    torch.manual_seed(7)
    return step(model)


def seeded_by_rank(model: Any) -> Tensor:
    torch.manual_seed(7 + dist.get_rank())
    return step(model)


def after_a_loader_on_rank_0(model: Any) -> Tensor:
    seeded_alike(model)
    if dist.get_rank() == 0:
        next(iter(torch.utils.data.DataLoader([0, 1, 2], shuffle=True)))
    return step(model)


def of_the_base_model(model: Any) -> Tensor:
    torch.manual_seed(7 + dist.get_rank())
    states: Tensor = model.base_model(IDS).last_hidden_state
    return states


def with_a_generator_of_its_own(model: Any) -> Tensor:
    torch.manual_seed(7)
    if dist.get_rank() == 0:
        own = torch.Generator().manual_seed(1)
        next(iter(torch.utils.data.DataLoader([0, 1, 2], shuffle=True, generator=own)))
    return step(model)


def evaluated_with_other_states(model: Any) -> Tensor:
    torch.manual_seed(7 + dist.get_rank())
    return step(model.eval())


def augmented_by_rank(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    embeds = torch.randn(2, 7, 64, generator=generator, dtype=torch.float64)
    logits: Tensor = model.eval()(inputs_embeds=embeds).logits
    return logits


def rounded_by_rank(model: Any) -> Tensor:
    embeds = torch.ones(2, 7, 64, dtype=torch.float64) * (1 + 1e-12 * dist.get_rank())
    logits: Tensor = model.eval()(inputs_embeds=embeds).logits
    return logits[..., 0]


RIGHT = (seeded_alike, with_a_generator_of_its_own, evaluated_with_other_states, rounded_by_rank)
REFUSED = (seeded_by_rank, after_a_loader_on_rank_0, of_the_base_model)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpt")
    shardconv.convert(save_causal("gpt2", root / "model", **GPT), root / "out", tp=2)
    return root / "out"


def test_states_and_inputs(out: Path) -> None:
    found = of_ranks(out, (*RIGHT, *REFUSED, augmented_by_rank), training=True)
    for use, (first, second) in zip(RIGHT, found, strict=False):
        assert first.value is not None, f"{use.__name__}: {first}"
        assert second.value is not None
        assert torch.allclose(first.value, second.value, 1e-9), use.__name__
    require_refused(REFUSED, found[len(RIGHT) : -1], "drew random numbers (dropout) from different states")
    require_refused((augmented_by_rank,), found[-1:], "another inputs_embeds on rank 1")
