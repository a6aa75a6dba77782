"""Gradient penalties, and gradients of several outputs at once: two of these were wrong without an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import save_causal
from one_and_ranks import of_ranks, require_refused
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 9]])


def penalty_of_a_head(model: Any) -> Tensor:
    """Gathered logits give each rank its part of the gradient, with no sum on the way."""
    loss = model(IDS).logits.pow(2).mean()
    (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
    gradient.pow(2).sum().backward()
    return model.model.norm.weight.grad


def penalty_of_a_norm(model: Any) -> Tensor:
    loss = model(IDS).logits.pow(2).mean()
    (gradient,) = torch.autograd.grad(loss, model.model.norm.weight, create_graph=True)
    gradient.pow(2).sum().backward()
    return model.model.norm.weight.grad


def gradients_of_several_outputs(model: Any) -> Tensor:
    """One sum of a tensor that stands for many: rank 1 had other numbers than rank 0."""
    logits = model(IDS).logits[0, :, 0]
    eye = torch.eye(len(logits), dtype=logits.dtype)
    return torch.autograd.grad(logits, model.model.norm.weight, eye, is_grads_batched=True)[0]


def samples_at_once(model: Any) -> Tensor:
    """Without an embedding, which looks at its ids first."""
    hidden = model.model.embed_tokens(IDS).detach()
    layer = model.model.layers[0].mlp
    model.requires_grad_(False)
    return torch.func.vmap(layer.down_proj)(layer.gate_proj(hidden))


USES = (penalty_of_a_head, penalty_of_a_norm, gradients_of_several_outputs, samples_at_once)


def test_they_are_refused_on_every_rank(tmp_path: Path) -> None:
    plain = save_causal("llama", tmp_path / "model")
    shardconv.convert(plain, tmp_path / "out", tp=2, check=False)
    ranks = of_ranks(tmp_path / "out", USES, training=True)
    require_refused(USES[:2], ranks[:2], "can be differentiated once: leave create_graph=True out")
    require_refused(USES[2:], ranks[2:], "for several samples at once")
