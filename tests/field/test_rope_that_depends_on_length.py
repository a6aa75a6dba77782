"""Requests of other lengths in one batch, for a model whose rotary embedding depends on the longest sequence.

In a packed call that is the longest of all requests: a short one beside a long one got the long one's
factors, and one that crosses the limit kept keys with other factors than ``generate``, which computes them
anew.
https://github.com/ggml-org/llama.cpp/pull/24875, https://github.com/vllm-project/vllm/pull/27431
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import pages
from checkpoints import CONFIGS, save_causal
from one_and_ranks import of_one, of_ranks, require_refused, require_same
from shardconv_runtime.inference import paged_model
from torch import Tensor

import shardconv

LIMIT, NEW = 16, 4
SHORT, LONG = [5, 6, 7, 8, 9], [(7 * i + 3) % 250 for i in range(40)]
CROSSING, UP_TO_LIMIT = LONG[:14], LONG[:13]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 10.0, 16.0, 22.0],
    "original_max_position_embeddings": LIMIT,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": LIMIT, "rope_parameters": LONGROPE},
    "llama": {"max_position_embeddings": LIMIT, "rope_parameters": DYNAMIC},
}


def answers(model: Any, *prompts: list[int]) -> Tensor:
    """By ``generate_batch`` on ranks; in one process each alone, as it should be."""
    if type(model).generate_batch is model.generate_batch.__func__:
        options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return torch.stack([model.generate(torch.tensor([p]), **options)[0, -NEW:] for p in prompts])
    config = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    found = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=pages(max_batch_tokens=128)
    )
    return torch.tensor([answer.generated_tokens for answer in found.values()])


def within(model: Any) -> Tensor:
    return answers(model, SHORT, UP_TO_LIMIT, SHORT[:2])


def short_beside_long(model: Any) -> Tensor:
    return answers(model, SHORT, LONG)


def long_alone(model: Any) -> Tensor:
    return answers(model, LONG)


def crossing(model: Any) -> Tensor:
    return answers(model, CROSSING)


REFUSED = (short_beside_long, long_alone, crossing)


@pytest.mark.parametrize("model_type", SETTINGS)
def test_requests_that_would_change_it_are_refused(model_type: str, tmp_path: Path) -> None:
    settings = {**CONFIGS[model_type], **SETTINGS[model_type]}
    plain = save_causal(model_type, tmp_path / "model", **settings)
    shardconv.convert(plain, tmp_path / "out", tp=2, check=False)
    one = of_one(plain, (within,))
    ranks = of_ranks(tmp_path / "out", (within, *REFUSED))
    require_same((within,), one, ranks[:1])
    require_refused(REFUSED, ranks[1:], "the model's rotary embedding for all tokens of a call")


def test_the_check_of_packed_calls_looks_at_a_short_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for code whose dependence on the length no config tells."""
    monkeypatch.setattr(paged_model, "length_limit", lambda config: None)
    plain = save_causal("phi3", tmp_path / "model", **{**CONFIGS["phi3"], **SETTINGS["phi3"]})
    shardconv.convert(plain, tmp_path / "out", tp=2, check=False)
    ranks = of_ranks(tmp_path / "out", (short_beside_long,))
    require_refused((short_beside_long,), ranks, "for a prompt of 5 tokens, next to sequences of up to 40")
