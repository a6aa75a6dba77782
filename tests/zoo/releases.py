"""Sizes of released models, for configs whose defaults are small, or are no model that people use.

Types that are not here are planned at the defaults of their config class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DTYPE = "bfloat16"
"""That models are planned in, unless a release says another."""


@dataclass(frozen=True, slots=True)
class Release:
    """One released model."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the config's class; a mapping is a sub-config."""
    dtype: str = DTYPE
    """Another one where the model's own code cannot compute in that."""
    class_name: str = ""
    """The class that the release is of; empty: all classes of the type without one of their own."""


def _decoder(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    """Arguments under their usual names."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **others,
    }


def _bart(hidden: int, inner: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """Arguments of an encoder and a decoder of the same size."""
    sides = {"layers": layers, "ffn_dim": inner, "attention_heads": heads}
    return {
        "d_model": hidden,
        **{f"{s}_{k}": v for s in ("encoder", "decoder") for k, v in sides.items()},
        **others,
    }


def _bert(hidden: int, inner: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


def _layers(kind: str, other: str, count: int, *others: int) -> list[str]:
    """A list with an entry for each layer."""
    return [other if index in others else kind for index in range(count)]


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LARGE = _bert(1024, 4096, 24, 16)
_QWEN2_72B = _decoder(8192, 29568, 80, 64, 8, 152064)
_QWEN3_MOE = {"moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
_QWEN3_235B = _decoder(4096, 12288, 94, 64, 4, 151936, **_QWEN3_MOE)
_QWEN2_VL_72B = _QWEN2_72B | {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
_SMALL_24B = _decoder(5120, 32768, 40, 32, 8, 131072, head_dim=128)
_GLM4_9B = _decoder(4096, 13696, 40, 32, 2, 151552, head_dim=128, pad_token_id=151329)
_GLM4V_ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
_GLM4V_TEXT = {"rope_parameters": _GLM4V_ROPE | {"rope_theta": 10000.0}}
_STEP_LAYERS = ["full_attention" if index % 4 == 0 else "sliding_attention" for index in range(45)]
_SCOUT = _decoder(
    5120, 8192, 48, 40, 8, 202048, head_dim=128, intermediate_size_mlp=16384, num_local_experts=16
) | {"interleave_moe_layer_step": 1, "pad_token_id": 200018}
_MAVERICK = _SCOUT | {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}
_LLAMA4_VISION = _bert(1408, 5632, 34, 16, image_size=336, patch_size=14, vision_output_dim=4096) | {
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}
_GEMMA2_27B = _decoder(4608, 36864, 46, 32, 16, 256000, head_dim=128, query_pre_attn_scalar=144)
_GEMMA3_27B = _decoder(5376, 21504, 62, 32, 16, 262208, head_dim=128, query_pre_attn_scalar=168)
_SIGLIP_SO400M = _bert(1152, 4304, 27, 16, image_size=896, patch_size=14)
_SIGLIP_LARGE_384 = _bert(1024, 4096, 24, 16, image_size=384, patch_size=16)
_PICTURE_NAMES = {"<image>": 8711} | {
    f"IMGIMG{''.join(chr(65 + int(digit)) for digit in str(code))}Z": code + 4 for code in range(8192)
}
"""Of tokens: the placeholder and the codes of pictures, whose digits are letters."""
_PIXTRAL = _bert(1024, 4096, 24, 16, head_dim=64, image_size=1540, patch_size=14)
_CLIP_L = _bert(1024, 4096, 24, 16, image_size=336, patch_size=14, projection_dim=768)
_CLIP_BIGG_TEXT = _bert(1280, 5120, 32, 20, projection_dim=1280)
_CLIP_BIGG_VISION = _bert(1664, 8192, 48, 16, image_size=224, patch_size=14, projection_dim=1280)
_NEMOTRON_H_8B = _decoder(4096, 21504, 52, 32, 8, 131072, head_dim=128) | {
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
}
_VICUNA_13B = _decoder(5120, 13824, 40, 40, 40, 32064, model_type="llama")
_LLAVA_13B = {
    "text_config": _VICUNA_13B,
    "vision_config": _CLIP_L | {"model_type": "clip_vision_model"},
    "image_token_index": 32000,
}
_VIT_HUGE = _bert(1280, 5120, 32, 16, patch_size=14)
_INSTRUCTED = {
    "text_config": _decoder(4096, 11008, 32, 32, 32, 32001) | {"model_type": "llama"},
    "qformer_config": {"vocab_size": 30523},
}
"""A Q-Former that reads the instruction, before a decoder."""

_VISION_TOKENS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
"""That the code of a thinker reads and its config lacks; those of Qwen's tokenizers."""
_GRANITE_SPEECH = (
    Release(
        "Granite-Speech-3.3-8B",
        {
            "text_config": {
                "model_type": "granite",
                **_decoder(4096, 12800, 40, 32, 8, 49160),
            },
            "encoder_config": {"num_layers": 16},
            "projector_config": {
                "model_type": "blip_2_qformer",
                **_bert(1024, 4096, 2, 16, encoder_hidden_size=1024),
            },
        },
    ),
)
_FITTED = "defaults, images as wide as the text"
"""Of types whose default vision tower does not fit their default decoder."""


def _fitted(width: int, **others: Any) -> tuple[Release, ...]:
    """Defaults, but for a vision tower that makes features of the decoder's width."""
    return (Release(_FITTED, {"vision_config": {"out_hidden_size": width}, **others}),)


_AUDIO_LARGE = _LARGE | {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}

RELEASES: Mapping[str, tuple[Release, ...]] = {
    "audio-spectrogram-transformer": (Release("AST base"),),
    "aya_vision": (
        Release("Aya Vision, 16 heads of its vision tower", {"vision_config": {"num_attention_heads": 16}}),
    ),
    "bart": (Release("BART large"),),
    "beit": (Release("BEiT large", _LARGE),),
    "bert": (Release("BERT large", _LARGE),),
    "bigbird_pegasus": (Release("BigBird-Pegasus large"),),
    "blip-2": (
        Release(
            "BLIP-2 OPT-6.7B",
            {
                "text_config": {
                    "model_type": "opt",
                    "hidden_size": 4096,
                    "word_embed_proj_dim": 4096,
                    "ffn_dim": 16384,
                    "num_hidden_layers": 32,
                    "num_attention_heads": 32,
                    "vocab_size": 50304,
                },
                "image_token_index": 50265,
            },
        ),
        Release(
            "BLIP-2 ITM ViT-g",
            {"qformer_config": {"use_qformer_text_input": True, "vocab_size": 30523}},
            class_name="Blip2ForImageTextRetrieval",
        ),
    ),
    "bloom": (
        Release("BLOOM 176B", {"hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880}),
    ),
    "chameleon": (Release("defaults with names of tokens", {"vocabulary_map": _PICTURE_NAMES}),),
    "clip": (
        Release(
            "CLIP bigG",
            {"text_config": _CLIP_BIGG_TEXT, "vision_config": _CLIP_BIGG_VISION, "projection_dim": 1280},
        ),
    ),
    "codegen": (Release("CodeGen-16B", {"n_embd": 6144, "n_layer": 34, "n_head": 24, "rotary_dim": 64}),),
    "cohere_compass_text": (
        Release(
            "defaults with a rotary base for each kind of layer",
            {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
        ),
    ),
    "cohere": (
        Release("Command-R", _decoder(8192, 22528, 40, 64, 64, 256000)),
        Release("Command-R+", _decoder(12288, 33792, 64, 96, 8, 256000, use_qk_norm=True)),
    ),
    "cohere2": (Release("Command A", _decoder(12288, 36864, 64, 96, 8, 256000, head_dim=128)),),
    "cosmos3_omni": _fitted(4096),
    "dbrx": (
        Release(
            "DBRX",
            {
                "d_model": 6144,
                "n_heads": 48,
                "n_layers": 40,
                "vocab_size": 100352,
                "max_seq_len": 32768,
                "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500000.0},
                "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
            },
        ),
    ),
    "deberta": (Release("DeBERTa XLarge", _bert(1024, 4096, 48, 16), dtype="float32"),),
    "deberta-v2": (Release("DeBERTa-v2 xxlarge", _bert(1536, 6144, 48, 24, vocab_size=128100)),),
    "cohere_compass": (
        Release(
            "defaults with rotary bases, images as wide as the text",
            {
                "text_config": {
                    "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)
                },
                "vision_config": {"out_hidden_size": 8192},
            },
        ),
    ),
    "deepseek_v2": (
        Release(
            "DeepSeek-V2-Lite",
            _decoder(2048, 10944, 27, 16, 16, 102400, q_lora_rank=None, kv_lora_rank=512)
            | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2}
            | {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        ),
    ),
    "deepseek_v3": (
        Release("DeepSeek-V3"),
        Release(
            "Kimi-K2",
            _decoder(7168, 18432, 61, 64, 64, 163840, moe_intermediate_size=2048, n_routed_experts=384)
            | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "pad_token_id": 163839},
        ),
    ),
    "deepseek_vl": (
        Release(
            "DeepSeek-VL-1.3B",
            {"text_config": _decoder(2048, 5632, 24, 16, 16, 102400), "vision_config": _SIGLIP_LARGE_384},
        ),
    ),
    "deepseek_vl_hybrid": (
        Release(
            "DeepSeek-VL-7B",
            {"text_config": _decoder(4096, 11008, 30, 32, 32, 102400), "vision_config": _SIGLIP_LARGE_384},
        ),
    ),
    "dinov2": (Release("DINOv2 giant", _bert(1536, 6144, 40, 24, use_swiglu_ffn=True, patch_size=14)),),
    "dots1": (
        Release(
            "dots.llm1",
            _decoder(4096, 10944, 62, 32, 32, 152064, n_routed_experts=128, n_shared_experts=2)
            | {"moe_intermediate_size": 1408, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
            | {"n_group": 1, "topk_group": 1},
        ),
    ),
    "electra": (Release("ELECTRA large", _LARGE | {"embedding_size": 1024}),),
    "esm": (
        Release("ESM-2 15B", _bert(5120, 20480, 48, 40, vocab_size=33, pad_token_id=1, mask_token_id=32)),
    ),
    "exaone4_5": _fitted(4096),
    "falcon": (
        Release(
            "Falcon-180B",
            {"hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232, "num_kv_heads": 8}
            | {"new_decoder_architecture": True, "vocab_size": 65024},
        ),
        Release(
            "Falcon-7B",
            {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024},
        ),
    ),
    "falcon_h1": (
        Release(
            "Falcon-H1-34B",
            _decoder(5120, 21504, 72, 20, 4, 261120, head_dim=128, mamba_d_ssm=4096, mamba_n_heads=32)
            | {"mamba_d_head": 128, "mamba_n_groups": 2, "mamba_d_state": 256},
        ),
    ),
    "fnet": (Release("FNet large", {"hidden_size": 1024, "num_hidden_layers": 24}, dtype="float32"),),
    "gemma2": (Release("Gemma-2-27B", _GEMMA2_27B),),
    "gemma3": (Release("Gemma-3-27B", {"text_config": _GEMMA3_27B, "vision_config": _SIGLIP_SO400M}),),
    "gemma3_text": (Release("Gemma-3-27B", _GEMMA3_27B),),
    "glm": (Release("GLM-4-9B-chat", _GLM4_9B),),
    "glm4": (Release("GLM-4-9B-0414", _GLM4_9B),),
    "glm5_next": _fitted(4096),
    "glm_ocr": _fitted(1024),
    "glm46v": (Release("GLM-4.6V-Flash", {"text_config": _GLM4V_TEXT}),),
    "glm4_moe": (
        Release(
            "GLM-4.5",
            _decoder(5120, 12288, 92, 96, 8, 151552, head_dim=128, n_routed_experts=160)
            | {"moe_intermediate_size": 1536, "num_experts_per_tok": 8, "n_shared_experts": 1}
            | {"first_k_dense_replace": 3, "use_qk_norm": True, "attention_bias": True}
            | {"pad_token_id": 151329},
        ),
    ),
    "glm4v": (Release("GLM-4.1V-9B", {"text_config": _GLM4V_TEXT}),),
    "glm4v_moe": (Release("GLM-4.5V", {"text_config": _GLM4V_TEXT | {"head_dim": 128}}),),
    "glmga": (Release("defaults with the rotary sections of GLM-4.1V", {"text_config": _GLM4V_TEXT}),),
    "gpt2": (Release("GPT-2 XL", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),),
    "gpt_bigcode": (
        Release("StarCoder", {"n_embd": 6144, "n_layer": 40, "n_head": 48, "vocab_size": 49152}),
    ),
    "gpt_neox": (Release("GPT-NeoX-20B"),),
    "gpt_oss": (Release("gpt-oss-120b"),),
    "granite4_vision": (
        Release(
            "defaults with the layers and sizes of Granite-4.0-Vision",
            {
                "image_grid_pinpoints": [[384, 768], [768, 384], [768, 768]],
                "vision_config": _SIGLIP_SO400M
                | {"image_size": 384, "patch_size": 16, "model_type": "siglip_vision_model"},
                "qformer_config": {
                    "hidden_size": 1152,
                    "encoder_hidden_size": 1152,
                    "num_attention_heads": 16,
                },
                "text_config": {"vocab_size": 32064, "model_type": "granite4_vision_text"},
                "vision_feature_select_strategy": "full",
                "deepstack_layer_map": [[-19, 9], [-13, 6], [-7, 3], [-1, 0]],
                "spatial_target_layers": [12, 15, 18, 21],
                "downsample_rate": "4/8",
            },
        ),
    ),
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "granitemoehybrid": (
        Release(
            "Granite-4.0-H-Small",
            _decoder(4096, 768, 40, 32, 8, 100352, num_local_experts=72, num_experts_per_tok=10)
            | {"shared_intermediate_size": 1536, "mamba_n_heads": 128, "mamba_d_head": 64}
            | {"layer_types": _layers("linear_attention", "full_attention", 40, 5, 15, 25, 35)},
        ),
    ),
    "hubert": (Release("HuBERT xlarge", _AUDIO_LARGE | _bert(1280, 5120, 48, 16)),),
    "hunyuan_v1_dense": (Release("Hunyuan-7B", _decoder(4096, 14336, 32, 32, 8, 128167, head_dim=128)),),
    "hunyuan_v1_moe": (
        Release(
            "Hunyuan-A13B",
            _decoder(4096, 3072, 32, 32, 8, 128167, head_dim=128, num_experts=64, moe_topk=8),
        ),
    ),
    "idefics2": (
        Release(
            "Idefics2-8B",
            {
                "text_config": _decoder(4096, 14336, 32, 32, 8, 32003) | {"model_type": "mistral"},
                "vision_config": _bert(1152, 4304, 27, 16, image_size=980, patch_size=14),
            },
        ),
    ),
    "idefics3": (
        Release(
            "Idefics3-8B",
            {
                "text_config": _decoder(4096, 14336, 32, 32, 8, 128259) | {"model_type": "llama"},
                "vision_config": _bert(1152, 4304, 27, 16, image_size=364, patch_size=14),
            },
        ),
    ),
    "instructblip": (Release("InstructBLIP Vicuna-7B", _INSTRUCTED | {"image_token_index": 32000}),),
    "instructblipvideo": (Release("InstructBLIP Vicuna-7B", _INSTRUCTED | {"video_token_index": 32000}),),
    "internvl": (
        Release(
            "InternVL3-78B",
            {
                "text_config": _QWEN2_72B | {"model_type": "qwen2", "vocab_size": 151674},
                "vision_config": _bert(3200, 12800, 45, 25, image_size=[448, 448], use_qk_norm=True),
            },
        ),
    ),
    "jamba": (Release("Jamba-1.5-Mini"),),
    "janus": (Release(_FITTED, {"vision_config": {"projection_dim": 4096}}),),
    "lfm2_moe": (
        Release(
            "LFM2-8B-A1B",
            _decoder(2048, 7168, 24, 32, 8, 65536, num_experts=32, num_experts_per_tok=4)
            | {"moe_intermediate_size": 1792, "num_dense_layers": 2}
            | {"layer_types": _layers("conv", "full_attention", 24, 2, 6, 10, 14, 18, 21)},
        ),
    ),
    "llama": (
        Release("Llama-3.1-405B", _decoder(16384, 53248, 126, 128, 8, 128256)),
        Release("Llama-3.1-8B", _decoder(4096, 14336, 32, 32, 8, 128256)),
    ),
    "llama4": (
        Release("Llama-4-Scout", {"text_config": _SCOUT, "vision_config": _LLAMA4_VISION}),
        Release("Llama-4-Maverick", {"text_config": _MAVERICK, "vision_config": _LLAMA4_VISION}),
    ),
    "llama4_text": (Release("Llama-4-Scout", _SCOUT), Release("Llama-4-Maverick", _MAVERICK)),
    "llava": (Release("LLaVA-1.5-13B", _LLAVA_13B),),
    "llava_next": (Release("LLaVA-1.6-Vicuna-13B", _LLAVA_13B),),
    "llava_next_video": (
        Release("LLaVA-1.6-Vicuna-13B, videos too", _LLAVA_13B | {"image_token_index": 32001}),
    ),
    "m2m_100": (Release("M2M-100-12B", _bart(4096, 16384, 24, 16, vocab_size=128112)),),
    "mamba": (Release("Mamba-2.8B", {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280}),),
    "ministral": (Release("Ministral-8B", _decoder(4096, 12288, 36, 32, 8, 131072, head_dim=128)),),
    "mistral": (Release("Mistral-Small-24B", _SMALL_24B),),
    "mistral3": (
        Release(
            "Mistral-Small-3.1-24B",
            {
                "text_config": _SMALL_24B | {"model_type": "mistral"},
                "vision_config": _PIXTRAL | {"model_type": "pixtral"},
            },
        ),
    ),
    "mixtral": (Release("Mixtral-8x22B", _decoder(6144, 16384, 56, 48, 8, 32768)),),
    "minicpm_ocr": (Release("defaults with a token for images", {"image_token_id": 151667}),),
    "minicpmv4_6": (Release("defaults with a token for images", {"image_token_id": 151667}),),
    "minicpmv4_7": (Release("defaults with a token for images", {"image_token_id": 151667}),),
    "modernvbert": (
        Release("ModernVBERT", {"vision_config": {"image_size": 512, "model_type": "siglip_vision_model"}}),
    ),
    "molmo2": (Release(_FITTED, {"adapter_config": {"text_hidden_size": 4096}}),),
    "mpt": (Release("MPT-30B", {"d_model": 7168, "n_heads": 64, "n_layers": 48, "vocab_size": 50432}),),
    "mt5": (
        Release(
            "mT5-XXL",
            {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24, "vocab_size": 250112},
        ),
    ),
    "nemotron": (Release("Minitron-8B", _decoder(4096, 16384, 32, 48, 8, 256000, head_dim=128)),),
    "nemotron_h_omni": (
        Release(
            "defaults with sounds, and with ids of images, videos and sounds",
            {
                "audio_config": {"projection_hidden_size": 4096, "projection_bias": False},
                "image_token_id": 18,
                "video_token_id": 19,
                "audio_token_id": 27,
            },
        ),
    ),
    "nemotron_h": (Release("Nemotron-H-8B", _NEMOTRON_H_8B),),
    "nllb-moe": (Release("NLLB-MoE-54B", _bart(2048, 8192, 24, 16, vocab_size=256206)),),
    "olmo2": (Release("OLMo-2-32B", _decoder(5120, 27648, 64, 40, 8, 100352, pad_token_id=100277)),),
    "opt": (
        Release(
            "OPT-66B",
            {
                "hidden_size": 9216,
                "word_embed_proj_dim": 9216,
                "ffn_dim": 36864,
                "num_hidden_layers": 64,
                "num_attention_heads": 72,
            },
        ),
    ),
    "ovis2": (Release(_FITTED, {"hidden_size": 4096}),),
    "phi": (Release("Phi-2", _decoder(2560, 10240, 32, 32, 32, 51200)),),
    "phi3": (
        Release(
            "phi-4",
            _decoder(5120, 17920, 40, 40, 10, 100352, pad_token_id=100349, bos_token_id=100257)
            | {"eos_token_id": 100265, "max_position_embeddings": 16384},
        ),
        Release("Phi-3-mini", _decoder(3072, 8192, 32, 32, 32, 32064)),
    ),
    "pop2piano": (Release("Pop2Piano"),),
    "qwen2": (Release("Qwen2.5-72B", _QWEN2_72B),),
    "qwen2_5_omni_thinker": (Release("Qwen2.5-Omni-7B", _VISION_TOKENS),),
    "qwen2_5_vl": (
        Release(
            "Qwen2.5-VL-72B",
            {"text_config": _QWEN2_VL_72B, "vision_config": {"out_hidden_size": 8192, "hidden_size": 1280}},
        ),
    ),
    "qwen2_vl": (
        Release(
            "Qwen2-VL-72B",
            {"text_config": _QWEN2_VL_72B, "vision_config": {"hidden_size": 8192, "embed_dim": 1280}},
        ),
    ),
    "qwen3": (Release("Qwen3-32B", _decoder(5120, 25600, 64, 64, 8, 151936, head_dim=128)),),
    "qwen3_5": _fitted(4096),
    "qwen3_5_moe": _fitted(2048),
    "qwen3_asr": (Release("defaults, sounds as wide as the text", {"audio_config": {"output_dim": 2048}}),),
    "qwen3_moe": (Release("Qwen3-235B-A22B", _QWEN3_235B),),
    "qwen3_omni_moe_thinker": (
        Release(
            "Qwen3-Omni-30B-A3B",
            {
                "text_config": _decoder(2048, 768, 48, 32, 4, 152064, head_dim=128)
                | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
                "vision_config": {"out_hidden_size": 2048},
                "audio_config": {"output_dim": 2048},
                **_VISION_TOKENS,
            },
        ),
    ),
    "qwen3_vl": _fitted(4096),
    "qwen3_vl_moe": _fitted(2048),
    "reformer": (
        Release("defaults of a decoder", {"is_decoder": True}, class_name="ReformerModelWithLMHead"),
    ),
    "rembert": (Release("RemBERT"),),
    "roberta": (Release("RoBERTa large", _LARGE | {"vocab_size": 50265, "max_position_embeddings": 514}),),
    "rwkv": (Release("RWKV-4-14B", {"hidden_size": 5120, "num_hidden_layers": 40, "vocab_size": 50277}),),
    "shieldgemma2": (Release("ShieldGemma-2, images of 896", {"vision_config": _SIGLIP_SO400M}),),
    "siglip": (
        Release(
            "SigLIP so400m",
            {
                "text_config": _bert(1152, 4304, 27, 16, projection_size=1152),
                "vision_config": _SIGLIP_SO400M | {"image_size": 384},
            },
        ),
    ),
    "smollm3": (Release("SmolLM3-3B"),),
    "smolvlm": (
        Release(
            "SmolVLM",
            {
                "text_config": _decoder(2048, 8192, 24, 32, 32, 49155) | {"model_type": "llama"},
                "vision_config": _bert(1152, 4304, 27, 16, image_size=384, patch_size=14),
                "scale_factor": 3,
                "image_token_id": 49153,
            },
        ),
    ),
    "starcoder2": (Release("StarCoder2-15B", _decoder(6144, 24576, 40, 48, 4, 49152)),),
    "step3p7": (
        Release(
            "Step-3.7-Flash, attention of Step-3.5-Flash",
            {
                "text_config": {
                    "layer_types": _STEP_LAYERS,
                    "num_sliding_attention_heads": 96,
                    "sliding_window": 512,
                }
            },
        ),
    ),
    "switch_transformers": (
        Release(
            "Switch-XXL",
            {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24, "num_decoder_layers": 24}
            | {"num_experts": 64, "num_sparse_encoder_layers": 12, "num_sparse_decoder_layers": 12},
        ),
    ),
    "t5": (
        Release(
            "T5-XXL",
            {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24}
            | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        ),
    ),
    "t5gemma2": (
        Release("defaults with the images of Gemma 3", {"encoder": {"vision_config": _SIGLIP_SO400M}}),
    ),
    "ultravbert": (
        Release(
            "defaults with the images of ModernVBERT",
            {"vision_config": {"image_size": 512, "model_type": "siglip_vision_model"}},
        ),
    ),
    "umt5": (
        Release(
            "UMT5-XXL",
            {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24, "vocab_size": 256384},
        ),
    ),
    "vit": (Release("ViT huge", _VIT_HUGE),),
    "voxtral": (
        Release(
            "Voxtral-Mini-3B",
            {
                "text_config": _decoder(3072, 8192, 30, 32, 8, 131072, head_dim=128),
                "audio_token_id": 24,
            },
        ),
    ),
    "wav2vec2": (Release("wav2vec 2.0 large", _AUDIO_LARGE),),
    "whisper": (
        Release(
            "Whisper large v3",
            _bart(1280, 5120, 32, 20, num_mel_bins=128, vocab_size=51866, pad_token_id=50256),
        ),
    ),
    "xglm": (
        Release("XGLM-7.5B", {"d_model": 4096, "ffn_dim": 16384, "num_layers": 32, "attention_heads": 32}),
    ),
    "xlm-roberta": (Release("XLM-R large", _LARGE | {"vocab_size": 250002, "max_position_embeddings": 514}),),
    "xlm-roberta-xl": (Release("XLM-R XXL", _bert(4096, 16384, 48, 32)),),
    "xlnet": (Release("XLNet large", dtype="float32"),),
    "xmod": (
        Release(
            "X-MOD base", {"vocab_size": 250002, "max_position_embeddings": 514, "default_language": "en_XX"}
        ),
    ),
}
"""By model type."""
