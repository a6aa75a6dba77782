"""Encoder-decoders whose decoder has fewer tokens than the encoder, as translators of two languages have.

The inputs of a trace are made up; ids of the encoder are beyond the table of such a decoder.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from small_models import save_random

import shardconv

SIZES = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}


def bert(rows: int, **options: bool) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=rows,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        **options,
    )


def composite() -> transformers.EncoderDecoderConfig:
    decoder = bert(60, is_decoder=True, add_cross_attention=True)
    found = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert(140), decoder)
    found.decoder_start_token_id, found.pad_token_id = 1, 0
    return found


MODELS = {
    "marian": (
        transformers.MarianMTModel,
        lambda: transformers.MarianConfig(
            vocab_size=140,
            decoder_vocab_size=60,
            share_encoder_decoder_embeddings=False,
            tie_word_embeddings=False,
            pad_token_id=1,
            eos_token_id=0,
            decoder_start_token_id=1,
            **SIZES,
        ),
    ),
    "fsmt": (
        transformers.FSMTForConditionalGeneration,
        lambda: transformers.FSMTConfig(langs=["en", "de"], src_vocab_size=140, tgt_vocab_size=60, **SIZES),
    ),
    "bert to bert": (transformers.EncoderDecoderModel, composite),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_converted_and_proven(name: str, tmp_path: Path) -> None:
    model_class, config = MODELS[name]
    save_random(config(), model_class, tmp_path / "base")
    plan = shardconv.convert(tmp_path / "base", tmp_path / "out", tp=2)
    assert not plan.inference_only
    assert not any("not numbers" in note for note in plan.notes)
