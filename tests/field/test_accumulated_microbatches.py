"""Microbatches of other numbers of labels, accumulated: the gradients of the whole batch.

Means of means weigh the labels of short samples more; the number of items of all microbatches divides each
sum.
https://github.com/huggingface/transformers/pull/34191, https://github.com/huggingface/accelerate/pull/3193
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

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 8], [35, 8, 9, 7, 93, 2, 1], [9, 9, 4, 4, 1, 2, 3]])
LABELS = torch.where(torch.arange(7) < torch.tensor([[2], [5], [0]]), -100, IDS)
NUM_ITEMS = int((LABELS[:, 1:] != -100).sum())


def gradients(model: Any) -> Tensor:
    return torch.cat([p.grad.double() for n, p in model.named_parameters() if n.endswith("norm.weight")])


def at_once(model: Any) -> Tensor:
    model(IDS, labels=LABELS).loss.backward()
    return gradients(model)


def accumulated(model: Any) -> Tensor:
    for ids, labels in zip(IDS, LABELS, strict=True):
        model(ids[None], labels=labels[None], num_items_in_batch=NUM_ITEMS).loss.backward()
    return gradients(model)


def by_a_tensor(model: Any) -> Tensor:
    for rows in (slice(0, 2), slice(2, 3)):
        number = torch.tensor(NUM_ITEMS)
        model(IDS[rows], labels=LABELS[rows], num_items_in_batch=number).loss.backward()
    return gradients(model)


def trimmed(model: Any) -> Tensor:
    """Each as long as it is: lengths that ranks divide, and others."""
    for i, length in enumerate((7, 6, 5)):
        labels = LABELS[i : i + 1, :length]
        model(IDS[i : i + 1, :length], labels=labels, num_items_in_batch=NUM_ITEMS).loss.backward()
    return gradients(model)


def twice(model: Any) -> Tensor:
    """Two backward passes of one graph."""
    loss = model(IDS, labels=LABELS).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


USES = (at_once, accumulated, by_a_tensor, trimmed, twice)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted for two ranks into "out"."""
    root = tmp_path_factory.mktemp("llama")
    shardconv.convert(save_causal("llama", root / "model"), root / "out", tp=2, sequence_parallel=True)
    return root


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_those_of_one_process(llama: Path, sequence_parallel: bool) -> None:
    one = of_one(llama / "model", USES, training=True)
    ranks = of_ranks(llama / "out", USES, training=True, sequence_parallel=sequence_parallel)
    require_same(USES, one, ranks, 1e-5)
    require_same((accumulated, by_a_tensor), [one[0]] * 2, ranks[1:3], 1e-5)
