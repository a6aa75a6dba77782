"""A mask of four dims with one for each head: refused by name, as a rank has some of the heads.

One for all heads is right, in any kind that transformers takes. Torch's error named two sizes.
https://github.com/huggingface/transformers/pull/46507
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import save_causal
from one_and_ranks import of_one, of_ranks, require_refused, require_same
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 93, 2]])


def seen(num_heads: int) -> Tensor:
    rng = torch.Generator().manual_seed(3)
    kept = torch.rand(2, num_heads, 6, 6, generator=rng) < 0.7
    return (kept | torch.eye(6, dtype=torch.bool)).tril()


def added(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


def bool_for_all(model: Any) -> Tensor:
    return model(IDS, attention_mask=seen(1)).logits


def added_for_all(model: Any) -> Tensor:
    return model(IDS, attention_mask=added(seen(1))).logits


def by_kind_of_layer(model: Any) -> Tensor:
    return model(IDS, attention_mask={"full_attention": seen(1)}).logits


def of_the_base_model(model: Any) -> Tensor:
    return model.base_model(IDS, attention_mask=seen(1)).last_hidden_state


RIGHT = (bool_for_all, added_for_all, by_kind_of_layer, of_the_base_model)


def bool_for_each(model: Any) -> Tensor:
    return model(IDS, attention_mask=seen(model.config.num_attention_heads)).logits


def added_for_each(model: Any) -> Tensor:
    return model(IDS, attention_mask=added(seen(model.config.num_attention_heads))).logits


def for_each_of_the_base_model(model: Any) -> Tensor:
    return model.base_model(IDS, attention_mask=seen(model.config.num_attention_heads)).last_hidden_state


def for_each_by_position(model: Any) -> Tensor:
    return model(IDS, seen(model.config.num_attention_heads)).logits


REFUSED = (bool_for_each, added_for_each, for_each_of_the_base_model, for_each_by_position)


def test_masks(tmp_path: Path) -> None:
    plain = save_causal("qwen3", tmp_path / "model")
    shardconv.convert(plain, tmp_path / "out", tp=2, check=False)
    one = of_one(plain, (*RIGHT, *REFUSED))
    assert all(each.value is not None for each in one)
    ranks = of_ranks(tmp_path / "out", (*RIGHT, *REFUSED))
    require_same(RIGHT, one[: len(RIGHT)], ranks[: len(RIGHT)])
    require_refused(REFUSED, ranks[len(RIGHT) :], "has a mask for each of 8 heads")
