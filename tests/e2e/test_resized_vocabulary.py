"""``resize_token_embeddings`` of a loaded model, in real processes: as of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime.errors import OptionError, RefusedCallError
from small_models import save_random, small_config
from torch import Tensor

import shardconv

VOCAB = 101
IDS = torch.arange(14).reshape(2, 7) * 8
"""Old tokens and new ones."""
SIZES = (116, 90, 110)
"""Sizes one after another: more, fewer, more."""


def tied(path: Path) -> Any:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
    none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return save_random(transformers.GPT2Config(**sizes, **none), transformers.GPT2LMHeadModel, path)


def untied(path: Path) -> Any:
    return save_random(small_config(vocab_size=VOCAB), transformers.LlamaForCausalLM, path)


def shared(path: Path) -> Any:
    """Three embeddings and a head share a weight, and a bias of the logits is a buffer."""
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "dropout": 0.0}
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = transformers.BartConfig(**heads, **sizes, vocab_size=VOCAB, max_position_embeddings=64)
    return save_random(config, transformers.BartForConditionalGeneration, path)


def resized(model: Any) -> Any:
    for size in SIZES:
        torch.manual_seed(3)
        table = model.resize_token_embeddings(size)
        assert table is model.get_input_embeddings()
    torch.manual_seed(3)
    model.resize_token_embeddings(SIZES[-1], pad_to_multiple_of=8)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 112
    return model


def results(model: Any) -> list[Tensor]:
    """Logits, a loss, tokens, and the norm of the gradients if the model is for training."""
    out = model(IDS, labels=IDS)
    found = [model(IDS).logits, out.loss]
    found.append(model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0))
    if out.loss.requires_grad:
        out.loss.backward()
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    return [t.detach().double() for t in found]


def on_rank(out: Path, root: Path) -> dict[str, list[Tensor]]:
    found = {}
    model: Any = shardconv_runtime.load(out, dtype=torch.float64)
    with pytest.raises(RefusedCallError, match="call it on the model that was loaded"):
        model.base_model.resize_token_embeddings(120)
    with pytest.raises(OptionError, match="cannot share a vocabulary of 1 tokens"):
        model.resize_token_embeddings(1)
    model.eval()
    found["inference"] = results(resized(model))
    model = resized(shardconv_runtime.load(out, dtype=torch.float64, training=True))
    found["training"] = results(model)
    shardconv_runtime.save(model, root / "saved")
    found["saved"] = results(shardconv_runtime.load(root / "saved", dtype=torch.float64))
    model.save_pretrained(root / "plain")
    model.register_forward_hook(lambda *given: None)
    with pytest.raises(RefusedCallError, match=r"register hooks afterwards"):
        model.resize_token_embeddings(120)
    return found


@pytest.mark.parametrize(
    ("make", "tp"),
    [
        (tied, 2),
        pytest.param(untied, 3, marks=pytest.mark.slow),
        pytest.param(shared, 2, marks=pytest.mark.slow),
    ],
    ids=["tied 2", "untied 3", "shared 2"],
)
def test_a_resized_model_equals_the_unsharded_one(
    make: Callable[[Path], Any], tp: int, tmp_path: Path
) -> None:
    model = make(tmp_path / "in").double().eval()
    shardconv.convert(tmp_path / "in", tmp_path / "out", tp=tp)
    ranks = run_processes(tp, on_rank, tmp_path / "out", tmp_path)
    want = results(resized(model))
    for found in ranks:
        for name, got in found.items():
            for value, right in zip(got, want[: len(got)], strict=True):
                torch.testing.assert_close(value, right, rtol=1e-6, atol=1e-7, msg=name)
    plain = type(model).from_pretrained(tmp_path / "plain", dtype=torch.float64)
    torch.testing.assert_close(plain(IDS).logits.double(), want[0])
