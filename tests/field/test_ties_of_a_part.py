"""Only the config of a model's text says that its head and its embedding are tied, or it says otherwise.

The head was then initialized at random, and the model generated gibberish. Reports: transformers#43429
(mistral3), transformers#43455 (aya_vision), transformers#46456, vllm#6758 (a head that is stored, too).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from small_models import save_random
from torch import Tensor

import shardconv

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT = {"num_hidden_layers": 1, "vocab_size": 101, "head_dim": 8, "num_key_value_heads": 2} | WIDTHS
IMAGES = {"num_hidden_layers": 2, "image_size": 16, "patch_size": 8} | WIDTHS
MODELS: Mapping[str, tuple[Any, Any, Mapping[str, Any], Mapping[str, Any]]] = {
    "mistral3": (
        transformers.Mistral3Config,
        transformers.Mistral3ForConditionalGeneration,
        {"model_type": "mistral"},
        {"model_type": "pixtral", "head_dim": 8},
    ),
    "aya_vision": (
        transformers.AyaVisionConfig,
        transformers.AyaVisionForConditionalGeneration,
        {"model_type": "cohere2"},
        {"model_type": "siglip_vision_model"},
    ),
    "llava": (
        transformers.LlavaConfig,
        transformers.LlavaForConditionalGeneration,
        {"model_type": "llama"},
        {"model_type": "clip_vision_model"},
    ),
}
CASES = [(kind, of_text, of_all) for kind in MODELS for of_text in (True, False) for of_all in (True, None)]


def name(case: tuple[str, bool, bool | None]) -> str:
    return "-".join(map(str, case))


def save(case: tuple[str, bool, bool | None], path: Path) -> None:
    kind, of_text, of_all = case
    config, cls, text, images = MODELS[kind]
    said = TEXT | text | {"tie_word_embeddings": of_text}
    save_random(config(text_config=said, vision_config=IMAGES | images, image_token_index=100), cls, path)
    file = path / "config.json"
    found = json.loads(file.read_text())
    found.pop("tie_word_embeddings", None)
    if of_all is not None:
        found["tie_word_embeddings"] = of_all
    file.write_text(json.dumps(found))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def on_rank(root: Path) -> dict[str, Tensor]:
    return {name(case): logits(shardconv_runtime.load(root / f"{name(case)}-out")) for case in CASES}


def test_the_head_is_that_of_from_pretrained(tmp_path: Path) -> None:
    """Sharded, and merged again."""
    for case in CASES:
        save(case, tmp_path / name(case))
        shardconv.convert(tmp_path / name(case), tmp_path / f"{name(case)}-out", tp=2, check=False)
    ranks = run_processes(2, on_rank, tmp_path)
    for case in CASES:
        cls = MODELS[case[0]][1]
        wanted = logits(cls.from_pretrained(tmp_path / name(case)))
        for found in ranks:
            assert torch.allclose(found[name(case)], wanted, atol=1e-5), case
        shardconv.merge(tmp_path / f"{name(case)}-out", tmp_path / f"{name(case)}-merged")
        assert torch.equal(logits(cls.from_pretrained(tmp_path / f"{name(case)}-merged")), wanted), case
