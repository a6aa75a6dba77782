"""A loss that a model computes of scores whose layer is sharded: each rank has that of one process.

Elsewhere heads with few outputs were sharded like any matrix, and losses taken of the shards.
https://github.com/vllm-project/vllm/pull/20682
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import CONFIGS, save
from one_and_ranks import of_one, of_ranks, require_same
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 8], [35, 8, 9, 7, 93, 2, 1]])
NARROW = CONFIGS["llama"] | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


def result(model: Any, output: Any) -> Tensor:
    """The loss, the logits, and gradients of both."""
    (output.loss + output.logits.square().mean()).backward()
    norms = [p.grad.flatten() for n, p in model.named_parameters() if n.endswith("norm.weight")]
    return torch.cat([output.loss.detach().reshape(1), output.logits.detach().flatten(), *norms])


def classes(model: Any) -> Tensor:
    return result(model, model(IDS, labels=torch.tensor([1, 4])))


def regression(model: Any) -> Tensor:
    model.config.problem_type = "regression"
    return result(
        model, model(IDS, labels=torch.linspace(0, 1, 2 * model.config.num_labels).view(2, -1).double())
    )


def several_classes(model: Any) -> Tensor:
    labels = (torch.arange(2 * model.config.num_labels).view(2, -1) % 3 == 0).double()
    return result(model, model(IDS, labels=labels))


def classes_of_tokens(model: Any) -> Tensor:
    return result(model, model(IDS, labels=(IDS % 5).masked_fill(IDS == 9, -100)))


def tokens_with_row_zero_of_each_rank(model: Any) -> Tensor:
    """The first row of the second rank is none of its padding."""
    ids = torch.tensor([[3, 32, 0, 33, 63, 32, 8]])
    output = model(ids, labels=ids)
    output.loss.backward()
    norms = [p.grad.flatten() for n, p in model.named_parameters() if n.endswith("LayerNorm.weight")]
    table = model.get_input_embeddings().weight.grad
    # The rows of the first rank, and those of the second: what each has is put where it belongs.
    whole = torch.zeros(64, table.shape[1], dtype=table.dtype)
    part = len(table)
    start = 0 if part == 64 else part * torch.distributed.get_rank()
    whole[start : start + part] = table
    if part != 64:
        torch.distributed.all_reduce(whole)
    return torch.cat([output.loss.detach().reshape(1), whole.flatten(), *norms])


SEQUENCE = (classes, regression, several_classes)
HEADS = {
    "few labels": (transformers.LlamaForSequenceClassification, NARROW | {"num_labels": 5}, SEQUENCE),
    "many labels": (transformers.LlamaForSequenceClassification, NARROW | {"num_labels": 301}, SEQUENCE),
    "tokens": (transformers.LlamaForTokenClassification, NARROW | {"num_labels": 301}, (classes_of_tokens,)),
}


def converted(root: Path, kind: Any, config: dict[str, Any]) -> None:
    model = kind._from_config(kind.config_class(**config, pad_token_id=0), dtype=torch.float64)
    shardconv.convert(save(model, root / "model"), root / "out", tp=2)


@pytest.mark.parametrize("name", HEADS)
def test_losses_and_gradients_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    kind, config, uses = HEADS[name]
    converted(tmp_path, kind, config)
    want = of_one(tmp_path / "model", uses, training=True)
    assert all(each.value is not None for each in want), want
    for options in ({}, {"gather_logits": False}):
        found = of_ranks(tmp_path / "out", uses, training=True, **options)
        if options and any(each.is_ours for ranks in found for each in ranks):
            assert all(each.is_ours for ranks in found for each in ranks)
            continue
        require_same(uses, want, found)


def test_the_padding_row_of_an_embedding_that_is_not_torchs(tmp_path: Path) -> None:
    config = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    converted(tmp_path, transformers.IBertForMaskedLM, config)
    uses: tuple[Callable[[Any], Tensor], ...] = (tokens_with_row_zero_of_each_rank,)
    want = of_one(tmp_path / "model", uses, training=True)
    require_same(uses, want, of_ranks(tmp_path / "out", uses, training=True))
