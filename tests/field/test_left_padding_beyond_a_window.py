"""Prompts of other lengths, padded on the left, longer than a layer's window: the texts of one process.

https://github.com/huggingface/transformers/issues/47651, https://github.com/unslothai/unsloth/pull/4078,
https://github.com/huggingface/transformers/pull/38046
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

RNG = torch.Generator().manual_seed(1)
IDS = torch.randint(3, 250, (2, 20), generator=RNG)
MASK = (torch.arange(20) >= torch.tensor([[9], [0]])).long()
"""The window is of 6 tokens."""


def generated(model: Any, **options: Any) -> Tensor:
    given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(IDS, attention_mask=MASK, **given)


def growing_cache(model: Any) -> Tensor:
    return generated(model)


def static_cache(model: Any) -> Tensor:
    return generated(model, cache_implementation="static")


def no_cache(model: Any) -> Tensor:
    return generated(model, use_cache=False)


def prefill_in_chunks(model: Any) -> Tensor:
    return generated(model, prefill_chunk_size=4)


def penalties(model: Any) -> Tensor:
    return generated(model, repetition_penalty=1.2, sequence_bias=[[[5], 3.0]], bad_words_ids=[[7]])


def short_one_alone(model: Any) -> Tensor:
    return model.generate(IDS[:1, 9:], max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)


@torch.no_grad()
def rows_of_a_cache(model: Any) -> Tensor:
    cache = model(IDS[:, :10], use_cache=True).past_key_values
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(3)
    return model(IDS[1:, 10:12].repeat(3, 1), past_key_values=cache).logits


@torch.no_grad()
def a_prompt_that_is_cached(model: Any) -> Tensor:
    cache = model(IDS[1:, :8], use_cache=True).past_key_values
    return model.generate(IDS[1:], past_key_values=cache, max_new_tokens=5, do_sample=False, pad_token_id=0)


USES = (
    growing_cache,
    static_cache,
    no_cache,
    prefill_in_chunks,
    penalties,
    short_one_alone,
    rows_of_a_cache,
    a_prompt_that_is_cached,
)


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_texts_are_those_of_one_process(model_type: str, tmp_path: Path) -> None:
    plain = save_causal(model_type, tmp_path / "model")
    shardconv.convert(plain, tmp_path / "out", tp=2, check=False)
    require_same(USES, of_one(plain, USES), of_ranks(tmp_path / "out", USES))
