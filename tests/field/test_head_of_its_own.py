"""A checkpoint has a head that differs from the embedding, under a config that ties them.

flan-T5, T5 v1.1, mT5 and UMT5 say ``tie_word_embeddings: false``; transformers forces True in the code, since
the embeddings are shared, and loads the head that is stored. madlad400 has no ``shared.weight``. Many a llama
was trained with a head of its own, and its config forgotten. Reports: transformers#48154 (the encoder got the
weights of the head), transformers#43681, transformers#47620, pegainfer#516 (the head became the embedding).

The checkpoint decides, as in ``from_pretrained``, and before the model is planned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from quantized_checkpoints import save_quantized
from safetensors.torch import load_file, save_file
from shardconv_runtime.errors import SourceError
from shardconv_runtime.format import plan_json
from small_models import save_random, small_config
from torch import Tensor

import shardconv

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
SMALL_T5 = {"num_layers": 1, "d_model": 32, "d_ff": 48, "num_heads": 4, "d_kv": 8, "vocab_size": 101}
EMBEDDING = "model.embed_tokens.weight"

Stored = dict[str, Tensor]


def own_head(embedding: str, head: str = "lm_head.weight") -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        stored[head] = torch.randn_like(stored[embedding])

    return change


def no_shared_weight(stored: Stored) -> None:
    """As in madlad400."""
    stored["decoder.embed_tokens.weight"] = stored.pop("shared.weight")
    own_head("decoder.embed_tokens.weight")(stored)


def own_encoder(stored: Stored) -> None:
    """Three different tables, and one that is stored twice."""
    stored["decoder.embed_tokens.weight"] = stored["shared.weight"].clone()
    stored["encoder.embed_tokens.weight"] = torch.randn_like(stored["shared.weight"])
    own_head("shared.weight")(stored)


CASES: Mapping[str, tuple[Any, Any, Callable[[Stored], None], dict[str, Any]]] = {
    "t5": (
        transformers.T5Config(**SMALL_T5, feed_forward_proj="gated-gelu", decoder_start_token_id=0),
        transformers.T5ForConditionalGeneration,
        own_head("shared.weight"),
        {"tie_word_embeddings": False},
    ),
    "umt5": (
        transformers.UMT5Config(**SMALL_T5, decoder_start_token_id=0),
        transformers.UMT5ForConditionalGeneration,
        own_head("shared.weight"),
        {"tie_word_embeddings": False},
    ),
    "without the shared one": (
        transformers.T5Config(**SMALL_T5, decoder_start_token_id=0),
        transformers.T5ForConditionalGeneration,
        no_shared_weight,
        {},
    ),
    "an encoder's own": (
        transformers.T5Config(**SMALL_T5, decoder_start_token_id=0),
        transformers.T5ForConditionalGeneration,
        own_encoder,
        {},
    ),
    "decoder": (
        small_config(tie_word_embeddings=True),
        transformers.LlamaForCausalLM,
        own_head(EMBEDDING),
        {},
    ),
    "encoder": (
        transformers.BertConfig(
            num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=101
        ),
        transformers.BertForMaskedLM,
        own_head("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        {},
    ),
}

AS_OTHERS = ("umt5", "encoder")
"""They differ from "t5" and "decoder" in their classes alone."""
FIRST = tuple(name for name in CASES if name not in AS_OTHERS)


def save(name: str, path: Path) -> Path:
    config, cls, change, said = CASES[name]
    save_random(config, cls, path)
    override(path, change)
    config = json.loads((path / "config.json").read_text()) | said
    (path / "config.json").write_text(json.dumps(config))
    return path


def override(path: Path, change: Callable[[Stored], None]) -> None:
    stored = load_file(path / "model.safetensors")
    torch.manual_seed(1)
    change(stored)
    save_file(stored, path / "model.safetensors", {"format": "pt"})


def call(model: Any, labels: bool = False) -> Any:
    is_pair = model.config.is_encoder_decoder and not labels
    given: dict[str, Any] = {"decoder_input_ids": IDS} if is_pair else {"labels": IDS} if labels else {}
    return model(input_ids=IDS, **given)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = call(model).logits
    return found


def train(model: Any) -> Tensor:
    """The loss, and the logits after a step."""
    loss = call(model, labels=True).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return torch.cat((loss.detach().view(1), logits(model.eval()).flatten()))


def on_rank(root: Path, names: tuple[str, ...]) -> dict[str, list[Tensor]]:
    found = {}
    for name in names:
        source, out = root / name, root / f"{name}-out"
        found[name] = [
            logits(shardconv_runtime.load(out)),
            logits(shardconv_runtime.load(source, plan=out)),
            train(trained := shardconv_runtime.load(out, training=True)),
        ]
        shardconv_runtime.save(trained, root / f"{name}-trained")
        found[name].append(logits(shardconv_runtime.load(root / f"{name}-trained")))
    return found


@pytest.mark.parametrize("names", [FIRST, pytest.param(AS_OTHERS, marks=pytest.mark.slow)])
def test_the_head_that_is_stored_is_used(names: tuple[str, ...], tmp_path: Path) -> None:
    """In calls, in training, from files, by a plan, saved, and merged again."""
    for name in names:
        save(name, tmp_path / name)
        notes = shardconv.convert(tmp_path / name, tmp_path / f"{name}-out", tp=2, check=False).notes
        assert any("from_pretrained has it" in note for note in notes), name
    ranks = run_processes(2, on_rank, tmp_path, names)
    for name in names:
        cls = CASES[name][1]
        model = cls.from_pretrained(tmp_path / name)
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        tied = dict(plan_json.read(tmp_path / f"{name}-out" / "plan.json").tied)
        assert ("lm_head.weight" in tied) == is_tied, name
        plain, trained = logits(model), train(model)
        wanted = [plain, plain, trained, logits(model)]
        for found in ranks:
            for each, reference in zip(found[name], wanted, strict=True):
                assert torch.allclose(each, reference, atol=1e-4), name
        shardconv.merge(tmp_path / f"{name}-out", tmp_path / f"{name}-merged")
        assert torch.equal(logits(cls.from_pretrained(tmp_path / f"{name}-merged")), plain), name
        shardconv.verify(tmp_path / f"{name}-out", against=tmp_path / name)


def load_by(source: Path, plan: Path) -> None:
    shardconv_runtime.load(source, plan=plan)


def test_plans_that_are_made_without_weights(tmp_path: Path) -> None:
    """Where weights are beside the config they are compared; a plan that ties is refused for such weights."""
    source = save("decoder", tmp_path / "source")
    assert shardconv.plan(source, 2).tied == ()
    tied = shardconv.plan(transformers.AutoConfig.from_pretrained(source), 2)
    assert tied.tied == (("lm_head.weight", EMBEDDING),)
    plan_json.write(tied, tmp_path / "plan.json")
    with pytest.raises(
        AssertionError, match=r"are one tensor in the plan, .* make the plan from the directory"
    ):
        run_processes(2, load_by, source, tmp_path / "plan.json")
    save_random(small_config(tie_word_embeddings=True), transformers.LlamaForCausalLM, tmp_path / "tied")
    shardconv.convert(tmp_path / "tied", tmp_path / "out", tp=2, check=False)
    assert shardconv.plan(tmp_path / "tied", 2).tied == tied.tied
    with pytest.raises(Exception, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight"):
        shardconv.verify(tmp_path / "out", against=source)
    (source / "model.safetensors").unlink()
    assert shardconv.plan(source, 2).tied == tied.tied


def load_packed(out: Path) -> Tensor:
    return logits(shardconv_runtime.load(out, dequantize=True))


def test_a_quantized_model(tmp_path: Path) -> None:
    """Its head is plain, and its other weights are packed."""
    config = small_config(tie_word_embeddings=True, dtype="bfloat16")
    save_quantized(config, transformers.LlamaForCausalLM, tmp_path / "packed")
    for name in ("packed", "packed-plain"):
        override(tmp_path / name, own_head(EMBEDDING))
    shardconv.convert(tmp_path / "packed", tmp_path / "out", tp=2, check=False)
    wanted = logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "packed-plain"))
    for found in run_processes(2, load_packed, tmp_path / "out"):
        assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_a_file_of_both_that_are_equal_stays_tied(tmp_path: Path) -> None:
    """Files of PyTorch hold both names; one table in two dtypes is one table once it is loaded."""
    path = tmp_path / "source"
    save_random(small_config(tie_word_embeddings=True), transformers.LlamaForCausalLM, path)
    override(path, lambda stored: stored.update({EMBEDDING: stored[EMBEDDING].bfloat16()}))
    override(path, lambda stored: stored.update({"lm_head.weight": stored[EMBEDDING].float()}))
    assert shardconv.plan(path, 2).tied == (("lm_head.weight", EMBEDDING),)
    override(path, lambda stored: [stored.pop(name) for name in (EMBEDDING, "lm_head.weight")] and None)
    with pytest.raises(SourceError, match="lacks 2 tensors"):
        shardconv.convert(path, tmp_path / "out", tp=2)
