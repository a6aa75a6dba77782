"""Caches that are allocated from the config, before the model is called: with the heads of the full model.

transformers' documentation does so for export, and its ``generate`` for a prefill in chunks. A rank has some
of the heads, and ``index_copy_`` failed.
https://github.com/huggingface/transformers/pull/39164, https://github.com/huggingface/transformers/pull/46446
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import save_causal
from one_and_ranks import of_one, of_ranks, require_refused, require_same
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5]])


def allocated(model: Any, cache: Any) -> Any:
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, width, torch.float64, torch.device("cpu"))
    return cache


def static(model: Any, **options: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=16, **options)


@torch.no_grad()
def two_calls(model: Any, cache: Any) -> Tensor:
    first = model(IDS, past_key_values=cache).logits
    return torch.cat((first, model(IDS[:, :1], past_key_values=cache).logits), 1)


def allocated_statically(model: Any) -> Tensor:
    return two_calls(model, allocated(model, static(model)))


def allocated_dynamically(model: Any) -> Tensor:
    return two_calls(model, allocated(model, transformers.DynamicCache(config=model.config)))


def used_again(model: Any) -> Tensor:
    cache = allocated(model, static(model))
    first = two_calls(model, cache)
    cache.reset()
    return torch.cat((first, two_calls(model, cache)))


def generated(model: Any) -> Tensor:
    cache = allocated(model, static(model))
    return model.generate(IDS, past_key_values=cache, max_new_tokens=4, do_sample=False)


def in_chunks(model: Any) -> Tensor:
    options = {"cache_implementation": "static", "prefill_chunk_size": 2}
    return model.generate(IDS, max_new_tokens=4, do_sample=False, **options)


USES = (allocated_statically, allocated_dynamically, used_again, generated, in_chunks)


@torch.no_grad()
def filled_by_another(model: Any) -> Tensor:
    other = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float64).eval()
    return model(IDS[:, :1], past_key_values=other(IDS, use_cache=True).past_key_values).logits


def filled_statically(model: Any) -> Tensor:
    other = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float64).eval()
    cache = static(model)
    with torch.no_grad():
        other(IDS, past_key_values=cache)
        return model(IDS[:, :1], past_key_values=cache).logits


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama, saved as "model"."""
    root = tmp_path_factory.mktemp("llama")
    save_causal("llama", root / "model")
    return root


def test_an_empty_cache_gets_the_heads_of_the_rank(llama: Path) -> None:
    shardconv.convert(llama / "model", llama / "out", tp=2, check=False)
    require_same(USES, of_one(llama / "model", USES), of_ranks(llama / "out", USES))
    refused = (filled_by_another, filled_statically)
    require_refused(refused, of_ranks(llama / "out", refused), "another model filled the cache")


def test_on_stages(llama: Path) -> None:
    """Stages without a layer keep one head of one element for it."""
    shardconv.convert(llama / "model", llama / "staged", tp=1, pp=2, check=False)
    require_same(USES, of_one(llama / "model", USES), of_ranks(llama / "staged", USES))
