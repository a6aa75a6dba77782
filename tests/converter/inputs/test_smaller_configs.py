"""Configs with smaller images, sounds and chunks: which numbers follow."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from shardconv.inputs.smaller_configs import smaller_configs


def changed(before: Any, after: Any, path: str = "") -> dict[str, Any]:
    """The values that a config has changed, after their paths."""
    out: dict[str, Any] = {}
    for key, value in before.items():
        if isinstance(value, dict) and isinstance(after[key], dict):
            out |= changed(value, after[key], f"{path}{key}.")
        elif value != after[key]:
            out[path + key] = after[key]
    return out


@pytest.mark.parametrize(
    ("config", "want"),
    [
        pytest.param(
            transformers.LlavaNextConfig(
                vision_config={"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
                image_grid_pinpoints=[[336, 672], [1008, 336]],
            ),
            {
                "vision_config.image_size": 84,
                "image_grid_pinpoints": [[84, 168], [252, 84]],
                "image_seq_length": 36,
            },
            id="parts of large images",
        ),
        pytest.param(
            transformers.Gemma3Config(
                vision_config={"image_size": 896, "patch_size": 14}, mm_tokens_per_image=256
            ),
            {"vision_config.image_size": 112, "mm_tokens_per_image": 4},
            id="merged patches",
        ),
        pytest.param(
            transformers.ViTConfig(image_size=518, patch_size=14, max_position_embeddings=37 * 37),
            {"image_size": 112},
            id="rows that nothing divides",
        ),
        pytest.param(transformers.EfficientNetConfig(image_size=600), {"image_size": 120}, id="no patches"),
        pytest.param(
            transformers.WhisperConfig(max_source_positions=1500), {"max_source_positions": 48}, id="sounds"
        ),
        pytest.param(
            transformers.Qwen2_5OmniAudioEncoderConfig(max_source_positions=1500, n_window=100),
            {"max_source_positions": 75, "n_window": 5},
            id="as many windows of a sound",
        ),
        pytest.param(transformers.BambaConfig(mamba_chunk_size=256), {"mamba_chunk_size": 32}, id="chunks"),
        pytest.param(
            transformers.LongformerConfig(attention_window=[512, 256]),
            {"attention_window": [32, 32]},
            id="windows of layers",
        ),
        pytest.param(transformers.PegasusXConfig(block_size=512), {"block_size": 32}, id="blocks"),
    ],
)
def test_what_follows_from_a_smaller_size_is_smaller(config: Any, want: dict[str, Any]) -> None:
    before = config.to_dict()
    first = next(iter(smaller_configs(config)))
    assert {k: v for k, v in changed(before, first.to_dict()).items() if k in want} == want
    assert config.to_dict() == before


def test_sizes_of_texts_and_ids_stay() -> None:
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
        text_config={"model_type": "llama", "max_position_embeddings": 576, "intermediate_size": 672},
        image_token_index=336,
    )
    for smaller in smaller_configs(config):
        assert smaller.text_config.to_dict() == config.text_config.to_dict()
        assert smaller.image_token_id == config.image_token_id


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(),
        transformers.BambaConfig(mamba_chunk_size=16),
        transformers.Qwen2_5OmniAudioEncoderConfig(max_source_positions=1500, n_window=3),
    ],
    ids=["text", "small", "small windows of a long sound"],
)
def test_what_is_small_stays(config: Any) -> None:
    assert not list(smaller_configs(config))
