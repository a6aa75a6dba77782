"""A microbatch without a label: its loss and its gradients are those of one process.

Where each rank divides by the labels of its own part, or skips the backward pass, ranks get NaN or wait.
https://github.com/karpathy/nanochat/pull/623, https://github.com/meta-llama/llama-cookbook/issues/133
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

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 8], [35, 8, 9, 7, 93, 2, 1]])


def result(model: Any, loss: Tensor) -> Tensor:
    loss.backward()
    norms = [p.grad.double() for n, p in model.named_parameters() if n.endswith("norm.weight")]
    return torch.cat((loss.detach().double().nan_to_num(-1.0).reshape(1), *norms))


def none_in_the_batch(model: Any) -> Tensor:
    return result(model, model(IDS, labels=torch.full_like(IDS, -100)).loss)


def none_with_a_number_of_items(model: Any) -> Tensor:
    return result(model, model(IDS, labels=torch.full_like(IDS, -100), num_items_in_batch=5).loss)


def none_in_a_row(model: Any) -> Tensor:
    labels = IDS.clone()
    labels[0] = -100
    return result(model, model(IDS, labels=labels).loss)


def one_label(model: Any) -> Tensor:
    labels = torch.full_like(IDS, -100)
    labels[1, -1] = 7
    return result(model, model(IDS, labels=labels).loss)


def another_index(model: Any) -> Tensor:
    return result(model, model(IDS, labels=IDS.masked_fill(IDS > 9, 0), ignore_index=0).loss)


def accumulated(model: Any) -> Tensor:
    """A microbatch without labels between others."""
    total = torch.zeros(())
    for labels in (IDS, torch.full_like(IDS, -100), IDS.masked_fill(IDS > 9, -100)):
        loss = model(IDS, labels=labels, num_items_in_batch=17).loss
        loss.backward()
        total = total + loss.detach()
    norms = [p.grad.double() for n, p in model.named_parameters() if n.endswith("norm.weight")]
    return torch.cat((total.double().reshape(1), *norms))


USES = (
    none_in_the_batch,
    none_with_a_number_of_items,
    none_in_a_row,
    one_label,
    another_index,
    accumulated,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted for two ranks into "out"."""
    root = tmp_path_factory.mktemp("llama")
    shardconv.convert(save_causal("llama", root / "model"), root / "out", tp=2, sequence_parallel=True)
    return root


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_losses_are_those_of_one_process(llama: Path, sequence_parallel: bool) -> None:
    ranks = of_ranks(llama / "out", USES, training=True, sequence_parallel=sequence_parallel)
    require_same(USES, of_one(llama / "model", USES, training=True), ranks, 1e-5)
