"""Tiny configs by introspection: every size of a default config is replaced by what its name says it is.

A config is walked with its sub-configs. Counts of layers become as many as show every kind of layer,
widths 64, heads 8, vocabularies 256 and so on; everything that is no size stays as the type's authors
set it. What a pattern cannot know is in ``overrides.py``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EXPERTS = 64, 8, 4, 8, 256, 4

_SIZES: tuple[tuple[str, int], ...] = (
    (
        r"(hidden_size|n_embd|d_model|dim|dim_model|embed_dim|embedding_size|word_embed_proj_dim|emb_dim)",
        HIDDEN,
    ),
    (r"(attention_hidden_size|pooler_hidden_size|decoder_hidden_size|encoder_hidden_size)", HIDDEN),
    (r"(input|output)_embedding_size|backbone_hidden_size|cross_attention_hidden_size", HIDDEN),
    (r"(prediction_head_size|text_hidden_size|vision_hidden_size|audio_hidden_size|lru_width)", HIDDEN),
    (r"(out_hidden_size|output_size|projection_dim|text_dim|adapter_out_dim)", HIDDEN),
    (r"(num_hidden_layers|n_layers?|num_layers|num_blocks|depth|num_nextn_predict_layers)", 2),
    (r"(encoder|decoder|text|speech_encoder|t2u_encoder|t2u_decoder)_layers", 2),
    (r"num_(encoder|decoder)_layers|num_layers_per_stack", 2),
    (r"(num_attention_heads|n_heads?|num_heads|.*_attention_heads|.*_attn_heads)", HEADS),
    (r"num_(encoder|decoder|self|cross)?_?attention_heads|linear_num_heads|index_n_heads", HEADS),
    (r"linear_num_value_heads", HEADS),
    (r"linear_num_key_heads", KV_HEADS),
    (r"(head_dim|dim_head|d_head|d_kv|attention_head_size|attention_head_dim|swa_head_dim)", HEAD_DIM),
    (r"(linear_head_dim|linear_key_head_dim|linear_value_head_dim|index_head_dim)", HEAD_DIM),
    (r"(v_head_dim|qk_nope_head_dim|qk_rope_head_dim|rotary_dim|global_head_dim)", HEAD_DIM),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"(q|kv|o)_lora_rank", 32),
    (r"(intermediate_size|ffn_dim|d_ff|dim_ff|dff|n_inner|ffn_hidden_size|hidden_dim|mlp_dim|d_inner)", 128),
    (r"(encoder|decoder|t2u_encoder|t2u_decoder)_ffn_dim|feed_forward_size|dense_intermediate_size", 128),
    (r"(speech_encoder_intermediate_size|shared_intermediate_size|dense_ff_dim)", 128),
    (r"(moe|expert|shared_expert|moe_shared_expert|shared_experts)_(intermediate|ffn_hidden)_size", 32),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)", EXPERTS),
    (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts|topk)", 2),
    (r"(n_group|topk_group|num_expert_group|num_expert_groups|num_expert_group_topk)", 1),
    (r"(src_|tgt_|decoder_|text_|audio_|unit_)?vocab_size|vocab_size_per_layer_input|.*_vocab_size", VOCAB),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|context_length)", 128),
    (r"max_source_positions", 50),
    (r"max_target_positions|max_(encoder|decoder)_position_embeddings|model_max_length", 128),
    (r"(sliding_window|attention_window_size|attention_window|local_attention|window_size)", 16),
    (r"(attention_chunk_size|keep_window_size|sliding_window_size)", 16),
    (r"mamba_n_heads|mamba_num_heads", HEADS),
    (r"mamba_d_ssm", 128),
    (r"first_k_dense_replace", 1),
    (r"(state_size|mamba_d_state|ssm_state_size|mamba_state_dim)", 8),
    (r"(hidden_size_per_layer_input|embedding_rank|laurel_rank|adapter_rank|router_hidden_size)", 16),
    (r"(mamba_)?chunk_size", 8),
    (r"num_mel_bins", 16),
    (r"index_topk", 8),
    (r"(image_size|crop_size)", 32),
    (r"patch_size", 8),
)

_LAYER_COUNTS = re.compile(r"num_hidden_layers|n_layers?|num_layers|num_blocks")
KV_HEADS_ARGUMENT = re.compile(
    r"(.*_)?(num_)?(key_value_heads|kv_heads|kv_n_heads|query_groups)|multi_query_group_num"
)
_TOKEN_ID = re.compile(r".*_(token_id|token_index|id|index)")


def tiny_config(
    config_class: type[PreTrainedConfig], overrides: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """A config of a few hundred thousand parameters.

    Args:
        config_class: of a model type; it must have defaults.
        overrides: what introspection cannot find out; a mapping for a sub-config overrides in there. A
            ``None`` key is not passed on. ``__default__`` are arguments for the default config itself.
    """
    arguments = tiny_arguments(config_class, overrides or {})
    return config_class(**arguments)


def tiny_arguments(config_class: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for ``config_class``."""
    overrides = dict(overrides)
    default = config_class(**overrides.pop("__default__", {}))
    values = _argument_values(default)
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            given = overrides.pop(name, {})
            sub = tiny_arguments(type(value), given)
            out[name] = {**sub, "model_type": value.model_type} if value.model_type else sub
        else:
            found = _tiny_value(name, value, values)
            if found is not None:
                out[name] = found
    out |= _layers(values)
    out |= overrides
    out = {k: v for k, v in out.items() if v is not _LEAVE}
    _small_ids(values, out)
    return out


_LEAVE = object()
LEAVE = _LEAVE
"""As an override: the default stays."""


def _argument_values(config: PreTrainedConfig) -> dict[str, Any]:
    """What the arguments of a config's class became, under the names that the class gives them."""
    names = inspect.signature(type(config).__init__).parameters
    plain = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    values = {}
    for name in names:
        attribute = config.attribute_map.get(name, name)
        if attribute in plain:
            values[name] = plain[attribute]
    return values or plain


def _tiny_value(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    if name == "head_dim" and value is None:
        return HEAD_DIM
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if KV_HEADS_ARGUMENT.fullmatch(name):
        heads = [v for k, v in values.items() if k in ("num_attention_heads", "n_heads", "n_head")]
        if value == 1:
            return None
        return HEADS if heads and heads[0] == value else KV_HEADS
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return size if value > 0 else None
    return None


def _layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The lists that have an entry for each layer, cut to show every kind once (two layers at least)."""
    counts = [v for k, v in values.items() if _LAYER_COUNTS.fullmatch(k) and isinstance(v, int)]
    lists = {
        k: list(v)
        for k, v in values.items()
        if isinstance(v, (list, tuple)) and counts and len(v) == counts[0] > 1
    }
    if not lists:
        return {}
    rows = list(zip(*lists.values(), strict=True))
    keys = [str(r) for r in rows]
    shown = sorted({keys.index(k) for k in keys})
    if len(shown) < 2:
        shown = [0, len(rows) - 1]
    out: dict[str, Any] = {k: [v[i] for i in shown] for k, v in lists.items()}
    for name, value in values.items():
        if _LAYER_COUNTS.fullmatch(name) and value == counts[0]:
            out[name] = len(shown)
    return out


def _small_ids(values: Mapping[str, Any], out: dict[str, Any]) -> None:
    """Ids of special tokens must be in the vocabulary."""
    fixed = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vocabulary = out.get("vocab_size") or out.get("text_config", {}).get("vocab_size") or VOCAB
    following = 3
    for name, value in values.items():
        if not _TOKEN_ID.fullmatch(name) or isinstance(value, bool) or name in out:
            continue
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, int) and name.endswith(("token_id", "token_index")):
            if name in fixed:
                out[name] = fixed[name]
            elif first >= vocabulary:
                out[name] = vocabulary - following
                following += 1


def config_class(model_type: str) -> type[PreTrainedConfig]:
    """The config class of a model type."""
    return CONFIG_MAPPING[model_type]
