"""What introspection cannot know of a type's sizes, and the types that are left out, with the reason."""

from __future__ import annotations

from typing import Any

from .shrink import LEAVE

_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}

_DOTS = {
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 8,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
    "head_dim": 16,
}
_NEMOTRON_H = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "chunk_size": 8}
_QWEN4 = {
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": [*_ALTERNATING, *_ALTERNATING],
    "num_kv_shared_layers": 2,
    "global_head_dim": 16,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}

_MROPE = {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}}}
_GEMMA4_DRAFT = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_hidden_layers": 2,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "audio_config": {"codebook_dim": 64, "codebook_size": 64},
        "vision_config": {"codebook_size": 64},
        "image_token_id": 100,
        "audio_token_id": 101,
        "image_token_offset": 110,
        "audio_token_offset": 174,
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 64}},
    "hy_v4_vl": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}},
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [1, 0]},
        "image_start_token_id": 201,
        "low_res_image_start_token_id": 202,
        "image_end_token_id": 203,
        "image_patch_id": 204,
        "frame_start_token_id": 205,
        "frame_end_token_id": 206,
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}, "text_config": _NEMOTRON_H},
    "pocket_tts": {"flow_head_config": {"condition_dim": 64}},
    "wavtokenizer": {"codebook_dim": 64},
    "afmoe": {
        "num_hidden_layers": 3,
        "layer_types": [*_ALTERNATING, "sliding_attention"],
        "num_dense_layers": 1,
    },
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": {"qformer_config": {"use_qformer_text_input": True}},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere2_moe": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "layer_types": _ALTERNATING,
        "num_hidden_layers": 2,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "layer_types": _ALTERNATING,
    },
    "dots3_note_text": _DOTS,
    "flint": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "mlp_only_layers": [0],
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": [*_ALTERNATING, *_ALTERNATING, "full_attention"],
        "intermediate_size": [128] * 5,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
    },
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_assistant": {
        "__default__": {"text_config": _GEMMA4_DRAFT},
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": {"global_head_dim": 16}},
    "gemma4_unified_text": {"global_head_dim": 16},
    "got_ocr2": {
        "vision_config": {
            "image_size": 256,
            "patch_size": 16,
            "output_channels": 16,
            "global_attn_indexes": [1],
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "funnel": {"block_sizes": [2, 1]},
    "granite_speech": {"encoder_config": {"hidden_dim": 64}, "window_size": LEAVE},
    "granite_speech_plus": {"encoder_config": {"hidden_dim": 64}, "window_size": LEAVE},
    "hubert": {"conv_dim": (32,) * 7},
    "inkling2_text": {
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "unpadded_vocab_size": 250,
    },
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"], "unpadded_vocab_size": 250},
    "instructblip": {"image_token_index": 250},
    "instructblipvideo": {"video_token_index": 250},
    "internvl": {"vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}},
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 4, "attn_layer_offset": 2},
    "jetmoe": {"kv_channels": 8},
    "kosmos-2": {"text_config": {"layers": 2}, "latent_query_num": 8},
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [8, 12],
    },
    "lfm2": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "full_attn_idxs": None,
        "block_multiple_of": 16,
    },
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
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
    "mellum": {"layer_types": _ALTERNATING, "mlp_layer_types": ["dense", "sparse"]},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"layer_types": _ALTERNATING},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "modernbert": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "modernbert-decoder": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "modernvbert": {
        "text_config": {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        }
    },
    "moss_transcribe_diarize": {"audio_config": {"max_source_positions": 52}},
    "nemotron": {"num_key_value_heads": 4},
    "nemotron_h": _NEMOTRON_H,
    "nemo_speechlm": {"text_config": _NEMOTRON_H},
    "neomme": {"head_dim": 16},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "phi4_multimodal": {
        "audio_config": {
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
            "nemo_conv_channels": 64,
        },
    },
    "qwen2": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen3_omni_moe_thinker": _MROPE
    | {"audio_config": {"downsample_hidden_size": 32, "output_dim": 64}}
    | {"vision_config": {"deepstack_visual_indexes": [0]}}
    | {"vision_start_token_id": 247, "vision_end_token_id": 248},
    "qwen3_vl": _MROPE,
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen3_asr": {"audio_config": {"downsample_hidden_size": 32, "output_dim": 64}},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": (32, 32),
        "axial_pos_shape": (8, 16),
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "masked:reformer": {"is_decoder": False},
    "segformer": {
        "hidden_sizes": [16, 32, 64, 128],
        "num_attention_heads": [1, 2, 4, 8],
        "depths": [2, 1, 1, 1],
    },
    "speech_to_text": {"conv_channels": 32, "input_feat_per_channel": 16},
    "switch_transformers": {
        "num_layers": 3,
        "num_decoder_layers": 3,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 4}},
    "voxtral": {"audio_token_id": 250},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": {
            "num_filters": 4,
            "downsampling_ratios": [2, 2],
            "depths": [1, 1, 1],
        },
        "semantic_tokenizer_encoder_config": {
            "num_filters": 4,
            "downsampling_ratios": [2, 2],
            "depths": [1, 1, 1],
        },
        "acoustic_tokenizer_chunk_size": 64,
    },
    "videoprism": {
        "vision_config": {
            "num_spatial_layers": 2,
            "num_temporal_layers": 2,
            "num_auxiliary_layers": 1,
            "tubelet_size": (1, 8, 8),
            "num_frames": 4,
        }
    },
    "wav2vec2": {"conv_dim": (32,) * 7},
    "xmod": {"default_language": "en_XX"},
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

__all__ = ["LEAVE", "OVERRIDES"]
