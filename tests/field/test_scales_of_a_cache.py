"""Checkpoints in FP8 have factors of the cache beside those of weights, in each engine's own place.

llm-compressor has them in the attention, or as those of outputs of projections; ModelOpt at the projections;
others one for both. transformers computes with a plain cache, and the dequantized model has no use for them.
Reports: vllm#46264, sglang#39942 (three namings), vllm#6738, text-generation-inference#2628.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from quantized_checkpoints import save_quantized
from safetensors.torch import load_file, save_file
from shardconv_runtime.errors import SourceError
from small_models import small_config
from torch import Tensor

import shardconv

NAMES = {
    "attention": ("self_attn.k_scale", "self_attn.v_scale"),
    "projections": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "fused projection": ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
    "one for both": ("self_attn.kv_scale", "self_attn.k_proj.kv_scale"),
    "outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}


def save(path: Path, names: tuple[str, ...], compressed: bool) -> tuple[Path, Path]:
    """A model in float8 with further factors, and the same one dequantized."""
    save_quantized(small_config(dtype="bfloat16"), transformers.LlamaForCausalLM, path)
    plain = path.with_name(f"{path.name}-plain")
    tensors = load_file(path / "model.safetensors")
    if compressed:
        tensors = compress(path, plain, tensors)
    tensors |= {f"model.layers.{layer}.{name}": torch.tensor([0.5]) for layer in range(2) for name in names}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path, plain


def compress(path: Path, plain: Path, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In the format of compressed-tensors, with a factor for each channel."""
    weights = load_file(plain / "model.safetensors")
    found = dict(weights)
    for name, weight in weights.items():
        if f"{name}_scale_inv" in stored:
            scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
            found[name] = (weight.float() / scale.float()).to(torch.float8_e4m3fn)
            found[f"{name}_scale"] = scale
            weights[name] = found[name].bfloat16() * scale
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    of_weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": of_weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
    (path / "config.json").write_text(json.dumps(config))
    return found


def require_plain(source: Path, plain: Path, tmp_path: Path) -> None:
    """Converted with a dtype, it is the plain model, and a note says what it lacks."""
    plan = shardconv.convert(source, tmp_path / "out", tp=2, dtype="bfloat16", check=False)
    assert any("factors of a quantized cache are among them" in note for note in plan.notes)
    shardconv.merge(tmp_path / "out", tmp_path / "merged")
    found, wanted = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", plain))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("names", NAMES)
def test_compressed_tensors(names: str, tmp_path: Path) -> None:
    source, plain = save(tmp_path / "source", NAMES[names], compressed=True)
    require_plain(source, plain, tmp_path)
    with pytest.raises(SourceError, match=r"kv_cache_scheme, .* pass --dtype to convert it dequantized"):
        shardconv.convert(source, tmp_path / "packed", tp=2, check=False)


def logits(path: Path, plan: Path | None = None) -> Tensor:
    model = shardconv_runtime.load(path, plan=plan, dequantize=True)
    with torch.no_grad():
        return model(torch.tensor([[5, 9, 2, 77]])).logits


@pytest.mark.parametrize("names", ["attention", "projections", "one for both"])
def test_fp8(names: str, tmp_path: Path) -> None:
    source, plain = save(tmp_path / "source", NAMES[names], compressed=False)
    require_plain(source, plain, tmp_path)
    if names != "projections":
        return
    shardconv.convert(
        source, tmp_path / "packed", tp=2, check=False
    )  # transformers' cache is plain there, too
    model = transformers.LlamaForCausalLM.from_pretrained(plain)
    with torch.no_grad():
        wanted = model(torch.tensor([[5, 9, 2, 77]])).logits
    for found in run_processes(2, logits, tmp_path / "packed"):
        assert (found - wanted).abs().max() <= 0.05 * wanted.abs().max()


def test_other_factors_are_still_refused(tmp_path: Path) -> None:
    """They may be those of weights, without which these are wrong."""
    source, _ = save(tmp_path / "source", ("self_attn.k_proj.other_scale",), compressed=False)
    with pytest.raises(
        SourceError, match=r"does not use, although it uses others of the same module: .*other_scale"
    ):
        shardconv.convert(source, tmp_path / "out", tp=2, dtype="bfloat16", check=False)
