"""Attention in batches is computed for each request by itself, with the same results."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from batches import batch, prompts
from checkpoints import VOCAB
from distributed import run_processes
from shardconv_runtime.inference import masks_by_request, paged_model
from shardconv_runtime.inference.masks_by_request import MaskByRequest, masked_by_request
from small_models import small_config
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.generation.continuous_batching.utils import build_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import shardconv

QUERIES, KEYS = (1, 4, 1, 3), (7, 4, 1, 9)
"""Tokens and keys of each request: two that decode, one that begins, and a part of a prompt."""
HEADS, KEY_HEADS, WIDTH = 6, 2, 8


class Counted:
    """Records the sizes of attention as it is computed: (queries, keys, heads of keys)."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int, int]] = []

    def __enter__(self) -> None:
        self.profile = torch.profiler.profile(record_shapes=True)
        self.profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.profile.__exit__(*error)
        for event in self.profile.events():
            if event.name == "aten::scaled_dot_product_attention":
                query, key = event.input_shapes[:2]
                self.sizes.append((query[-2], key[-2], key[1]))


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
    monkeypatch.setattr(masks_by_request, "SHARED_SCORES", 0)
    inputs, mask = packed(window)
    query = torch.randn(1, HEADS, sum(QUERIES), WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, 1, KEY_HEADS, sum(KEYS), WIDTH, dtype=torch.float64)
    want = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    apart = masked_by_request(inputs, torch.device("cpu"))["attention_mask"]
    counted = Counted()
    with counted:
        found = scaled_dot_product_attention(query, key, value, attn_mask=apart, enable_gqa=True)
        biased = scaled_dot_product_attention(query, key, value, attn_mask=apart + 1.0, enable_gqa=True)
        whole = scaled_dot_product_attention(query, query, query, attn_mask=apart[..., : query.shape[-2]])
    assert counted.sizes[:4] == [(q, k, KEY_HEADS) for q, k in zip(QUERIES, KEYS, strict=True)]
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    # With another mask than that of the batch, all is computed at once.
    assert counted.sizes[4:] == [(sum(QUERIES), sum(KEYS), KEY_HEADS), (sum(QUERIES), sum(QUERIES), HEADS)]
    torch.testing.assert_close(biased, want, rtol=1e-12, atol=1e-12)
    assert whole.shape == query.shape


def test_other_operators_get_the_plain_mask() -> None:
    inputs, mask = packed(1)
    apart = masked_by_request({**inputs, "attention_mask": {"full_attention": mask}}, torch.device("cpu"))
    found = apart["attention_mask"]["full_attention"]
    assert type(found) is MaskByRequest
    assert found.shape == mask.shape
    assert found.data_ptr() == mask.data_ptr()
    assert found[:, :, :, : mask.shape[-1]] is found  # the whole mask is still the mask of the batch
    for other in (found + 0, found[..., 1:], found.float(), torch.where(found == 0, found, 1.0)):
        assert type(other) is Tensor


def test_short_requests_share_a_block() -> None:
    """A call of the kernel for each of 64 takes longer than the scores that it saves."""
    assert masks_by_request._blocks([0, 1, 2, 3, 4], [0, 900, 1800, 1810, 4000]) == [
        (0, 1, 0, 900),
        (1, 3, 900, 1810),
        (3, 4, 1810, 4000),
    ]
    blocks = masks_by_request._blocks(range(65), range(0, 65 * 50, 50))
    assert len(blocks) == 11
    assert (blocks[0], blocks[-1][1::2]) == ((0, 6, 0, 300), (64, 3200))


def test_elsewhere_it_is_not_used() -> None:
    inputs, _ = packed(1)
    assert masked_by_request(inputs, torch.device("meta")) is inputs
    without = {**inputs, "attention_mask": None}
    assert masked_by_request(without, torch.device("cpu")) is without


def test_a_batch_computes_no_scores_between_requests(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of a gain: 64 requests took half as long when their scores were no longer computed."""
    source, out = tmp_path / "source", tmp_path / "out"
    config = small_config(vocab_size=VOCAB)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    shardconv.convert(source, out, tp=1, check=False)
    counted = Counted()
    monkeypatch.setattr(masks_by_request, "SHARED_SCORES", 0)
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
    shares = "paged|sdpa" not in ALL_ATTENTION_FUNCTIONS.valid_keys()
    want = config.num_key_value_heads if shares else config.num_attention_heads
    assert {heads for *_, heads in counted.sizes} == {want}


def threads_of_a_manager(path: Path) -> list[int]:
    """How many threads this process has, before and after a cache of 1 MB is made and filled."""
    torch.set_num_threads(2)
    model = shardconv_runtime.load(path)
    counts = [len(os.listdir("/proc/self/task"))]
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    manager = model.init_continuous_batching(continuous_batching_config=pages)
    manager.batch_processor = manager._create_batch_processor()
    counts.append(len(os.listdir("/proc/self/task")))
    torch.zeros(2**20).add_(1)
    return [*counts, len(os.listdir("/proc/self/task"))]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_no_threads_are_started_beside_those_of_the_loop(llama_dir: Path, tmp_path: Path) -> None:
    """The guard of a gain: with more threads than cores, those of OpenMP sleep between operators."""
    shardconv.convert(llama_dir, tmp_path / "out", tp=1, check=False)
    [(before, after, computed)] = run_processes(1, threads_of_a_manager, tmp_path / "out")
    assert after == before
    assert computed == before + 1  # which shows that they would be counted


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
