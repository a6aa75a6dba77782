"""Checkpoints in block-scaled float8, each beside the same model without blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

SUFFIX = "_scale_inv"
"""Of the names of factors."""

BLOCK = 16
PLAIN = ("lm_head", "embed", "norm", "mlp.gate.", "bias")
"""What stays as it is, as in published checkpoints."""


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and factors of a matrix."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    cells = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    factors = cells.abs().amax((1, 3)).clamp_min(1e-6) / 448
    values = (cells / factors[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return values.to(torch.float8_e4m3fn), factors


def dequantized(values: torch.Tensor, factors: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Values times the factors of their blocks, in bfloat16; blocks are in the last two dims."""
    spread = factors
    for dim in (-2, -1):
        spread = spread.repeat_interleave(block, dim).narrow(dim, 0, values.shape[dim])
    return (values.float() * spread).to(torch.bfloat16)


def save_quantized(config: Any, cls: Any, directory: Path) -> None:
    """A random model, quantized in ``directory`` and dequantized in ``directory``-plain."""
    torch.manual_seed(0)
    model = cls(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not any(part in name for part in PLAIN):
            stored[name], stored[name + SUFFIX] = quantize(tensor)
            factors = stored[name + SUFFIX]
            plain[name] = dequantized(stored[name], factors)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    other = directory.with_name(f"{directory.name}-plain")
    other.mkdir()
    save_file(plain, other / "model.safetensors", {"format": "pt"})
    (other / "config.json").write_text(json.dumps(settings))
    set_method(directory, quant_method="fp8", weight_block_size=[BLOCK, BLOCK], activation_scheme="dynamic")


def set_method(directory: Path, **settings: object) -> None:
    """Say in config.json how the weights are quantized."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def experts_config() -> Any:
    """A mixture of experts with latent attention; in per-expert files."""
    return transformers.DeepseekV3Config(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=50,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )


def dense_config() -> Any:
    """A dense model whose last blocks are cut short in the hidden dim."""
    return transformers.Qwen3Config(
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=50,
    )
