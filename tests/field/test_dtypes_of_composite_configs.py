"""A config of several parts says a dtype for a part, for the whole, or different ones; and a dtype is wanted.

What `from_pretrained` makes of it is not the dtype that one part says. Reports: transformers#46459,
Automodel#2017, mammothmoda#37, transformers#33997.
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
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SAID: Mapping[str, Mapping[str, str | None]] = {
    "only the text": {"": None, "text_config": "bfloat16"},
    "a wider whole": {"": "float32", "text_config": "bfloat16"},
    "a narrower whole": {"": "bfloat16", "text_config": "float32"},
    "another image": {"": "bfloat16", "vision_config": "float16"},
}
WANTED = (None, torch.float32, torch.bfloat16)
Found = dict[tuple[str, torch.dtype | None], tuple[dict[str, torch.dtype], Tensor]]


def save(path: Path, said: Mapping[str, str | None]) -> None:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 101} | SIZES,
        vision_config={
            "model_type": "clip_vision_model",
            "num_hidden_layers": 2,
            "image_size": 16,
            "patch_size": 8,
        }
        | SIZES,
        image_token_index=100,
    )
    save_random(config, transformers.LlavaForConditionalGeneration, path)
    file = path / "config.json"
    found: dict[str, Any] = json.loads(file.read_text())
    for part, dtype in said.items():
        place = found[part] if part else found
        place.pop("dtype", None)
        if dtype is not None:
            place["dtype"] = dtype
    file.write_text(json.dumps(found))


def described(model: Any) -> tuple[dict[str, torch.dtype], Tensor]:
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS).logits
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}, logits


def on_rank(root: Path) -> Found:
    return {
        (name, wanted): described(
            shardconv_runtime.load(root / name, plan=root / f"{name}-out", dtype=wanted)
        )
        for name in SAID
        for wanted in WANTED
    }


def test_dtypes_are_those_of_from_pretrained(tmp_path: Path) -> None:
    """The logits are too: what was stored is not rounded to a dtype in between."""
    for name, said in SAID.items():
        save(tmp_path / name, said)
        shardconv.convert(tmp_path / name, tmp_path / f"{name}-out", tp=2, check=False)
    for found in run_processes(2, on_rank, tmp_path):
        for (name, wanted), (dtypes, logits) in found.items():
            model = transformers.LlavaForConditionalGeneration.from_pretrained(
                tmp_path / name, dtype="auto" if wanted is None else wanted
            )
            theirs, expected = described(model.eval())
            assert dtypes == theirs, (name, wanted)
            rounding = 1e-5 if expected.dtype == torch.float32 else 3e-2
            assert logits.dtype == expected.dtype, (name, wanted)
            assert torch.allclose(logits, expected, atol=rounding * float(expected.abs().max())), (
                name,
                wanted,
            )
