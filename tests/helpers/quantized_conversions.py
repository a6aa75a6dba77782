"""Small models, quantized while they are converted, and what their exports must equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from shardconv_runtime.format.plan import Plan

import shardconv

Tensors = dict[str, torch.Tensor]


def dense(**sizes: int) -> Any:
    """A dense model with biases, with fewer heads of keys than of queries, and widths of 3 and 5 blocks."""
    config = transformers.LlamaConfig(
        **({"hidden_size": 384, "intermediate_size": 640, "num_hidden_layers": 1, "vocab_size": 64} | sizes),
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        attention_bias=True,
    )
    return transformers.LlamaForCausalLM(config)


def mixture(intermediate: int) -> Any:
    """A mixture of four experts, in per-expert files."""
    config = transformers.MixtralConfig(
        hidden_size=256,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config)


def encoder_decoder() -> Any:
    """With tied embeddings, and layers without biases."""
    config = transformers.T5Config(
        d_model=256, d_ff=384, num_heads=4, d_kv=64, num_layers=1, vocab_size=64, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def saved(model: Any, directory: Path) -> Path:
    """The model with random values in all of its parameters, in bfloat16."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.bfloat16).save_pretrained(directory / "source")
    return directory / "source"


def quantized(source: Path, directory: Path, tp: int, scheme: str) -> tuple[Plan, Path]:
    """Convert and export again."""
    plan = shardconv.convert(source, directory / f"out-{tp}", tp, quantize=scheme, check=False)
    shardconv.export(directory / f"out-{tp}", directory / f"hf-{tp}", "hf")
    return plan, directory / f"hf-{tp}"


def stored(directory: Path) -> Tensors:
    """All tensors of a checkpoint in one file, as bytes."""
    tensors = load_file(directory / "model.safetensors")
    return {
        f"{name} {t.dtype} {list(t.shape)}": t.reshape(-1).view(torch.uint8) for name, t in tensors.items()
    }


def require_equal(one: Path, other: Path) -> None:
    """The same tensors, bit for bit, and the same config."""
    ours, theirs = stored(one), stored(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((one / "config.json").read_text()) == json.loads((other / "config.json").read_text())
