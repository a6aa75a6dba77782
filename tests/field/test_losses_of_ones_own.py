"""Losses that a caller computes of the logits: log probabilities of tokens, preferences, distillation.

Elsewhere ranks that did not hold a token had no gradient of its log probability, or each had the loss of its
part.
https://github.com/modelscope/ms-swift/pull/9947, https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import save_causal
from one_and_ranks import of_one, of_ranks, require_same
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 8], [35, 8, 9, 7, 93, 2, 1]])


def result(model: Any, loss: Tensor) -> Tensor:
    loss.backward()
    norms = [p.grad.double().flatten() for n, p in model.named_parameters() if n.endswith("norm.weight")]
    return torch.cat((loss.detach().double().reshape(1), *norms))


def log_probabilities(model: Any) -> Tensor:
    logits = model(IDS).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]


def policy(model: Any) -> Tensor:
    """A clipped ratio to old log probabilities, times advantages."""
    with torch.no_grad():
        old = log_probabilities(model) - 0.1
    ratio = (log_probabilities(model) - old).exp()
    advantages = torch.tensor([[1.0], [-0.5]])
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return result(model, loss)


def preference(model: Any) -> Tensor:
    chosen, rejected = log_probabilities(model).sum(-1)
    return result(model, -F.logsigmoid(0.1 * (chosen - rejected)))


def distillation(model: Any) -> Tensor:
    with torch.no_grad():
        teacher = (model(IDS).logits * 0.5).softmax(-1)
    return result(model, F.kl_div(model(IDS).logits.log_softmax(-1), teacher, reduction="batchmean"))


def entropy(model: Any) -> Tensor:
    logits = model(IDS).logits
    return result(model, -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean())


def smoothed(model: Any) -> Tensor:
    logits = model(IDS).logits[:, :-1].flatten(0, 1)
    return result(model, F.cross_entropy(logits, IDS[:, 1:].flatten(), label_smoothing=0.1))


def largest_logits(model: Any) -> Tensor:
    return result(model, model(IDS).logits.max(-1).values.square().mean())


def beside_the_own_loss(model: Any) -> Tensor:
    """The model's loss and one of the logits of another call."""
    return result(model, model(IDS, labels=IDS).loss.double() + model(IDS).logits.square().mean())


def of_some_positions(model: Any) -> Tensor:
    return result(model, model(IDS, logits_to_keep=2).logits.square().mean())


USES = (
    policy,
    preference,
    distillation,
    entropy,
    smoothed,
    largest_logits,
    beside_the_own_loss,
    of_some_positions,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted for two ranks into "out"."""
    root = tmp_path_factory.mktemp("llama")
    plain = save_causal("llama", root / "model")
    shardconv.convert(plain, root / "out", tp=2, sequence_parallel=True)
    return root


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_those_of_one_process(llama: Path, sequence_parallel: bool) -> None:
    ranks = of_ranks(llama / "out", USES, training=True, sequence_parallel=sequence_parallel)
    require_same(USES, of_one(llama / "model", USES, training=True), ranks, 1e-5)
