"""The number of blocks of a cache that has room for some requests beside each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardconv_runtime.inference.batching_manager import PAGE_SIZE
from shardconv_runtime.inference.paged_model import CachedHeads, PagedCheck, PagedModel
from transformers import ContinuousBatchingConfig, LlamaConfig

KINDS = ("full_attention", "sliding_attention")
WINDOW = 24


@pytest.mark.skipif(PAGE_SIZE != "page_size", reason="caches of earlier versions count other blocks")
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=9),
    heads=st.integers(1, 3),
    width=st.sampled_from([2, 3, 8]),
    page_size=st.sampled_from([4, 5, 16]),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_all_requests_have_room(
    kinds: list[str], heads: int, width: int, page_size: int, lengths: list[int]
) -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.distributed import DistributedHelper
    from transformers.generation.continuous_batching.requests import RequestState

    config = LlamaConfig(
        num_hidden_layers=len(kinds),
        num_attention_heads=heads,
        hidden_size=heads * width,
        num_key_value_heads=heads,
        head_dim=width,
        vocab_size=32,
    )
    config.layer_types, config.sliding_window = kinds, WINDOW
    config._attn_implementation = "eager"
    cached = CachedHeads(tuple(range(len(kinds))), heads, width, torch.float32)
    model: Any = SimpleNamespace(config=config)
    blocks = PagedModel(model, cached, PagedCheck()).blocks_for(lengths, page_size)
    cache = PagedAttentionCache(
        config,
        ContinuousBatchingConfig(
            page_size=page_size, num_blocks=blocks, max_batch_tokens=16, max_memory_percent=0.5
        ),
        torch.device("cpu"),
        DistributedHelper(None, None),
        torch.float32,
    )
    for number, length in enumerate(lengths):
        assert cache.can_store_request_tokens(RequestState(str(number), [0] * length), length)
