"""An adapter's file has names of a compiled or a wrapped model, or the adapter's own name in them.

peft then warns, if at all, and gives the model an adapter that does nothing; where a module's copy is
missing, it raises a ``KeyError``. Reports: Soup#335 and Soup#351 (the prefix ``_orig_mod.`` of a compiled
model on every name), POVID#13 (the name ``default``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from safetensors.torch import load_file, save_file
from shardconv_runtime.errors import SourceError
from small_models import save_random, small_config
from torch import Tensor

import shardconv
from shardconv.converted.adapt import adapt

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
INNER = "base_model.model."
NAMES: Mapping[str, Callable[[str], str]] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled inside": lambda name: name.replace(INNER, f"{INNER}_orig_mod."),
    "compiled layers": lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    "over replicas": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "the adapter's own": lambda name: name.replace("lora_A", "lora_A.default").replace(
        "lora_B", "lora_B.default"
    ),
}


def on_rank(root: Path) -> dict[str, Tensor]:
    with torch.no_grad():
        return {
            name: shardconv_runtime.load(root / "out", adapter=root / f"{name}-out")(IDS).logits
            for name in NAMES
        }


def rename(source: Path, target: Path, new: Callable[[str], str]) -> None:
    target.mkdir()
    (target / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({new(name): tensor for name, tensor in tensors.items()}, target / "adapter_model.safetensors")


def test_it_is_the_adapter_that_was_trained(tmp_path: Path) -> None:
    """Also in one process, with what was written; other names are refused."""
    save_random(small_config(), transformers.LlamaForCausalLM, tmp_path / "base")
    shardconv.convert(tmp_path / "base", tmp_path / "out", tp=2, check=False)

    def base() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")

    config = peft.LoraConfig(
        target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], r=4, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base(), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
        wanted = model(IDS).logits
    model.save_pretrained(tmp_path / "saved")
    for name, new in NAMES.items():
        rename(tmp_path / "saved", tmp_path / name, new)
        plan = adapt(tmp_path / "out", tmp_path / name, tmp_path / f"{name}-out", check=False)
        assert any("as peft would have saved them" in note for note in plan.notes), name
        written = peft.PeftModel.from_pretrained(base(), tmp_path / f"{name}-out").eval()
        with torch.no_grad():
            assert torch.equal(written(IDS).logits, wanted), name
    for found in run_processes(2, on_rank, tmp_path):
        for name, logits in found.items():
            assert torch.allclose(logits, wanted, atol=1e-4), name

    rename(tmp_path / "saved", tmp_path / "another", lambda name: name.replace("layers", "blocks"))
    with pytest.raises(SourceError, match="another: 8 tensors of its file are missing from the model"):
        adapt(tmp_path / "out", tmp_path / "another", tmp_path / "another-out")
