"""Tiny checkpoints of real architectures, on disk as published ones are, every parameter random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

LAYERS, HIDDEN, HEADS, KV_HEADS, MLP, VOCAB = 2, 64, 8, 4, 128, 256
EXPERTS = 4

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": MLP,
    "max_position_embeddings": 128,
}
_GPT = {"vocab_size": VOCAB, "n_layer": LAYERS, "n_head": HEADS}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "mistral": {**_LLAMA_LIKE, "sliding_window": 6},
    "qwen2": _LLAMA_LIKE,
    "qwen3": {**_LLAMA_LIKE, "head_dim": 16},
    "gemma2": {**_LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "gemma3_text": {**_LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "gpt2": {**_GPT, "n_embd": HIDDEN, "n_positions": 128},
    "gpt_neox": {**_LLAMA_LIKE, "rotary_pct": 0.5},
    "bloom": {**_GPT, "hidden_size": HIDDEN},
    "phi3": _LLAMA_LIKE,
    "olmo2": _LLAMA_LIKE,
    "mixtral": {**_LLAMA_LIKE, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_LLAMA_LIKE,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": MLP,
    },
}
"""What is set in the config of each type; everything else is the type's own default."""

EXPERT_TYPES = ("mixtral", "qwen3_moe")
"""Types whose MLP is a stack of experts behind a router."""

ENCODER = {
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
    "max_position_embeddings": 128,
}


def save_causal(model_type: str, path: Path, **changes: object) -> Path:
    """Save a random causal language model of a type, in float64; return ``path``."""
    config = transformers.CONFIG_MAPPING[model_type](**CONFIGS[model_type] | changes, **_TOKENS)
    return save(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64), path)


def save_encoder(path: Path) -> Path:
    """Save a random BERT with its masked-language head, in float64; return ``path``."""
    config = transformers.BertConfig(**ENCODER)
    return save(transformers.BertForMaskedLM._from_config(config, dtype=torch.float64), path)


def save(model: Any, path: Path) -> Path:
    """Make every parameter random and save the model."""
    randomise(model)
    model.save_pretrained(path)
    return path


def randomise(model: nn.Module) -> None:
    """Draw every parameter: matrices, norms about 1, biases about 0.

    The gain lets the layers outweigh the embeddings: tied ones would repeat the last token for ever.
    """
    generator = torch.Generator().manual_seed(0)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() >= 2:
                value *= HIDDEN**-0.5 * (1 if id(parameter) in embeddings else 2)
            else:
                value = 0.3 * value + (0 if name.endswith("bias") else 1)
            parameter.copy_(value)
