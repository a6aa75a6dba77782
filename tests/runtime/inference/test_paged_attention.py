"""Attention in batches is computed for each request by itself, with the same results."""

from __future__ import annotations

import inspect
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from batches import batch, prompts
from checkpoints import VOCAB
from shardconv_runtime.inference import paged_model
from shardconv_runtime.inference.paged_model import AttentionByRequest
from small_models import small_config
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.generation.continuous_batching.utils import build_attention_mask
from transformers.integrations import sdpa_attention

import shardconv

QUERIES, KEYS = (1, 4, 1, 3), (7, 4, 1, 9)
"""Tokens and keys of each request: two that decode, one that begins, and a part of a prompt."""
HEADS, KEY_HEADS, WIDTH = 6, 2, 8


class Counted(TorchFunctionMode):
    """Records the sizes of attention: (queries, keys, heads of keys)."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.sizes.append((args[0].shape[-2], args[1].shape[-2], args[1].shape[1]))
        return func(*args, **(kwargs or {}))


def packed(window: int) -> tuple[dict[str, Any], Tensor]:
    """The inputs of a packed call, and its mask."""
    queries, keys = [0, *accumulate(QUERIES)], [0, *accumulate(KEYS)]
    mask = torch.full((1, 1, queries[-1], keys[-1]), -torch.inf, dtype=torch.float64)
    build_attention_mask(mask, queries, keys, window)
    inputs = {
        "cu_seq_lens_q": torch.tensor(queries),
        "cu_seq_lens_k": {"full_attention": torch.tensor(keys)},
        "attention_mask": mask,
    }
    return inputs, mask


@pytest.mark.parametrize("window", [1, 3])  # 1 is no window, for transformers
def test_results_are_those_of_all_requests_at_once(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(paged_model, "SHARED_SCORES", 0)
    inputs, mask = packed(window)
    query = torch.randn(1, HEADS, sum(QUERIES), WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, 1, KEY_HEADS, sum(KEYS), WIDTH, dtype=torch.float64)
    want = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    apart = AttentionByRequest.of(inputs, torch.device("cpu"))
    assert apart is not None
    counted = Counted()
    with counted, apart:
        found = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        biased = scaled_dot_product_attention(query, key, value, attn_mask=mask + 1.0, enable_gqa=True)
        plain = scaled_dot_product_attention(query, query, query)
    assert counted.sizes[:4] == [(q, k, KEY_HEADS) for q, k in zip(QUERIES, KEYS, strict=True)]
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    # Another mask than that of the batch, and attention without one, are left as they are.
    assert counted.sizes[4:] == [(sum(QUERIES), sum(KEYS), KEY_HEADS), (sum(QUERIES), sum(QUERIES), HEADS)]
    torch.testing.assert_close(biased, want, rtol=1e-12, atol=1e-12)
    assert plain.shape == query.shape


def test_short_requests_share_a_block() -> None:
    """A call of the kernel for each of 64 takes longer than the scores that it saves."""
    assert paged_model._blocks([0, 1, 2, 3, 4], [0, 900, 1800, 1810, 4000]) == [
        (0, 1, 0, 900),
        (1, 3, 900, 1810),
        (3, 4, 1810, 4000),
    ]
    blocks = paged_model._blocks(range(65), range(0, 65 * 50, 50))
    assert len(blocks) == 11
    assert (blocks[0], blocks[-1][1::2]) == ((0, 6, 0, 300), (64, 3200))


def test_elsewhere_it_is_not_used() -> None:
    inputs, _ = packed(1)
    assert AttentionByRequest.of(inputs, torch.device("meta")) is None
    assert AttentionByRequest.of({**inputs, "attention_mask": None}, torch.device("cpu")) is None
    assert not paged_model._by_request.get()


def test_a_batch_computes_no_scores_between_requests(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of a gain: 64 requests took half as long when their scores were no longer computed."""
    source, out = tmp_path / "source", tmp_path / "out"
    config = small_config(vocab_size=VOCAB)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    shardconv.convert(source, out, tp=1, check=False)
    counted = Counted()
    monkeypatch.setattr(paged_model, "SHARED_SCORES", 0)
    call = paged_model.PagedModel._call

    def recorded(self: Any, inputs: Any) -> Any:
        with counted:
            return call(self, inputs)

    monkeypatch.setattr(paged_model.PagedModel, "_call", recorded)
    batch(shardconv_runtime.load(out), prompts())
    assert len(counted.sizes) > len(prompts()) * config.num_hidden_layers
    longest = max(map(len, prompts())) + 16
    assert max(keys for _, keys, _ in counted.sizes) <= longest
    # Attention of 5.17 that reads pages is another function, which copies keys for each head.
    shares = "cache" in inspect.signature(sdpa_attention.sdpa_attention_forward).parameters
    want = config.num_key_value_heads if shares else config.num_attention_heads
    assert {heads for *_, heads in counted.sizes} == {want}


def test_what_was_found_of_a_model_is_kept(llama_dir: Path, tmp_path: Path) -> None:
    """Each call would begin with a call of one token, and with its first prompt computed twice."""
    shardconv.convert(llama_dir, tmp_path / "out", tp=1, check=False)
    model = shardconv_runtime.load(tmp_path / "out")
    calls: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: calls.append(ids[0].numel()))
    prompt = [list(range(3, 10))]
    first = batch(model, prompt)
    num_first = len(calls)
    assert batch(model, prompt) == first
    assert len(calls) - num_first == num_first - 2 == len(first[0])
    model.half()  # another dtype is cached: all of it is looked at again
    before = len(calls)
    batch(model, prompt)
    assert calls[before] == 1
