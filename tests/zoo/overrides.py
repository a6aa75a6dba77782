"""What introspection cannot know of a type's sizes, and the types that are left out, with the reason."""

from __future__ import annotations

from typing import Any

from .shrink import LEAVE

_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}

OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "intermediate_size": [128] * 5,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "full_attn_idxs": None,
        "block_multiple_of": 16,
    },
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4_text": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 1],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "chunked_attention"],
        "moe_layers": [1, 2],
        "intermediate_size_mlp": 128,
        "num_experts_per_tok": 1,
    },
    "longcat_flash": {"zero_expert_num": 2, "num_experts": 4, "n_routed_experts": 4, "moe_topk": 2},
    "mamba2": {"num_heads": 16, "n_groups": 4, "chunk_size": 8, "time_step_rank": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "chunk_size": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": (32, 32),
        "axial_pos_shape": (8, 16),
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 16,
        "mamba_dt_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
    "esm": {"vocab_size": 256, "pad_token_id": 1, "mask_token_id": 4},
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2},
}
"""By model type: arguments of the config that take the place of what introspection gives."""

LEFT_OUT: dict[str, str] = {}
"""By model type: why no model of it can be built or run here."""

__all__ = ["LEAVE", "LEFT_OUT", "OVERRIDES"]
