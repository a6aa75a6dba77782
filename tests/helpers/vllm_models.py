"""Tiny checkpoints of the kinds of models that vLLM loads in different ways."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

NEEDS_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; scripts/test_vllm installs it"
)

VOCAB = 1000
"""vLLM pads it to a multiple of 64."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", _COMMON | {"num_key_value_heads": 1}),
    "tied": ("qwen3", _COMMON | {"head_dim": 32, "tie_word_embeddings": True}),
    "mixture": (
        "qwen3_moe",
        _COMMON | {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "latent-attention": ("deepseek_v3", _COMMON | _LATENT),
    "transformers-backend": ("gpt_neox", _COMMON | {"rotary_pct": 0.5}),
    "state-space": (
        "mamba",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16},
    ),
}
"""Model type and config of each kind."""

FLOAT8 = "float8"
"""The mixture again, its matrices in float8 with a scale for each."""

KINDS = (*MODELS, FLOAT8)


def save(kind: str, path: Path, **sizes: int) -> Path:
    """Save a random model in bfloat16, or in float8."""
    if kind == FLOAT8:
        return _in_float8(save("mixture", path))
    model_type, settings = MODELS[kind]
    config = transformers.CONFIG_MAPPING[model_type](**settings | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(7)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dtype == torch.bfloat16:
            tensor.data.copy_(torch.randn(tensor.shape, generator=draw) * 0.2)
    model.save_pretrained(path)
    return path


def _in_float8(path: Path) -> Path:
    """Store the matrices of the layers, but those that choose experts, in float8."""
    file = path / "model.safetensors"
    found: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(sorted(load_file(file).items())):
        found[name] = tensor
        if "layers" in name and tensor.dim() == 2 and not name.endswith("mlp.gate.weight"):
            found[name] = (tensor.float() * 4).to(torch.float8_e4m3fn)
            found[f"{name}_scale"] = torch.tensor(0.1 + number / 1000)
            found[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.2 + number / 1000)
    save_file(found, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (path / "config.json").write_text(json.dumps(config))
    return path
