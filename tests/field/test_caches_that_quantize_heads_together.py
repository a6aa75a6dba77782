"""Ways of caching that a rank cannot have: refused by name on every rank.

One scale for all heads of a token, as the fp8 backend of a quantized cache has: a rank knows some of the
heads, and took a scale of its own. Pages, and layers that draft tokens, had errors about something else.

- https://github.com/vllm-project/vllm/issues/6738
- https://github.com/huggingface/transformers/pull/45821
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import save_causal
from one_and_ranks import of_one, of_ranks, require_refused, require_same
from shardconv_runtime.errors import PlanError
from shardconv_runtime.inference.assisted_generation import candidates_of_rank_0
from shardconv_runtime.loading.call_guards import require_scales_within_heads
from torch import Tensor
from transformers import cache_utils

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5]])


def generated(model: Any, **options: Any) -> Tensor:
    fixed = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), **fixed, **options)


def in_fp8(model: Any) -> Tensor:
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    return generated(model, **options)


def in_fp8_by_the_caller(model: Any) -> Tensor:
    cache = cache_utils.QuantizedCache("fp8", config=model.config)
    return model(IDS, past_key_values=cache).logits


def paged(model: Any) -> Tensor:
    return generated(model, cache_implementation="paged")


def plain(model: Any) -> Tensor:
    return generated(model)


class WithinHeads(cache_utils.QuantizedLayer):
    """A scale for each head and token."""

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        scale = tensor.abs().amax(-1, keepdim=True) / 7
        return (tensor / scale).round(), scale

    def _dequantize(self, quantized: tuple[Tensor, Tensor]) -> Tensor:
        return quantized[0] * quantized[1]


class AcrossHeads(WithinHeads):
    """A scale for each token."""

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        scale = tensor.abs().amax((1, 3), keepdim=True) / 7
        return (tensor / scale).round(), scale


def test_what_decides_is_what_the_cache_does() -> None:
    require_scales_within_heads(cache_utils.DynamicLayer(), 8)
    require_scales_within_heads(WithinHeads(), 8)
    with pytest.raises(PlanError, match=r"AcrossHeads.*divides 8"):
        require_scales_within_heads(AcrossHeads(), 8)


def test_layers_that_draft_tokens_are_not_in_a_converted_directory() -> None:
    class Model:
        def _get_candidate_generator(self, **_: Any) -> Any:
            raise OSError("no file named model.safetensors")

    get = candidates_of_rank_0(SimpleNamespace())  # type: ignore[arg-type]
    config = SimpleNamespace(use_mtp=True)
    with pytest.raises(PlanError, match=r"load\(SOURCE, plan=DIRECTORY\)"):
        get(Model(), generation_config=config)
    config.use_mtp = False
    with pytest.raises(OSError, match="no file"):
        get(Model(), generation_config=config)


def test_each_rank_refuses_by_name(tmp_path: Path) -> None:
    source = save_causal("llama", tmp_path / "model")
    shardconv.convert(source, tmp_path / "out", tp=2, check=False)
    uses = [paged, plain]
    if hasattr(cache_utils, "Fp8QuantizedLayer"):
        uses = [in_fp8, in_fp8_by_the_caller, *uses]
    ranks = of_ranks(tmp_path / "out", uses)
    require_same(uses[-1:], of_one(source, uses[-1:]), ranks[-1:])
    for use, found in zip(uses, ranks, strict=True):
        words = {"paged": "generate_batch(prompts", "plain": ""}.get(use.__name__, "several heads")
        if use is not plain:
            require_refused([use], [found], words)
