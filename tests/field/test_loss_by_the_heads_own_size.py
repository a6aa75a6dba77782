"""A model computes its loss by the size of its head: right in a model loaded for inference too, or refused.

Newer models pass ``vocab_size=self.lm_head.out_features`` to their loss. That code runs with labels only, and
was never traced: the logits were gathered, ``out_features`` was the rank's, and the shapes did not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import CONFIGS, save
from distributed import run_processes
from shardconv_runtime.errors import PlanError
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])

SIZES: dict[str, Callable[[Any, Tensor], int]] = {
    "the head's rows": lambda model, logits: model.lm_head.out_features,
    "the rows of the embedding": lambda model, logits: model.model.embed_tokens.num_embeddings,
    "the width of the logits": lambda model, logits: logits.shape[-1],
    "what the head takes": lambda model, logits: logits.shape[-1] * model.lm_head.in_features // 64,
    "the shape of a weight": lambda model, logits: model.lm_head.weight.shape[0],
    "the rows of the output embeddings": lambda model, logits: model.get_output_embeddings().weight.size(0),
}
"""What a loss may ask for the size of the vocabulary; the last two see the rank's own part of a weight."""

REFUSED = ("the shape of a weight", "the rows of the output embeddings")


class SizedConfig(transformers.LlamaConfig):
    """``asks`` is what the loss asks for."""

    model_type = "sized"

    def __init__(self, asks: str = "", **kwargs: Any) -> None:
        self.asks = asks
        super().__init__(**kwargs)


class SizedForCausalLM(transformers.LlamaForCausalLM):
    """Its loss asks a layer for the size of the vocabulary."""

    config_class = SizedConfig

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **kwargs)
        logits = self.lm_head(hidden.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=SIZES[self.config.asks](self, logits))
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=hidden.past_key_values)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Transformers knows the type while these tests run."""
    transformers.AutoConfig.register("sized", SizedConfig)
    transformers.AutoModelForCausalLM.register(SizedConfig, SizedForCausalLM)
    yield
    CONFIG_MAPPING._extra_content.pop("sized")
    transformers.AutoModelForCausalLM._model_mapping._extra_content.pop(SizedConfig)


def losses(out: Path) -> tuple[Any, Any]:
    """Without and with training; an error in place of a loss."""
    found: list[Any] = []
    for options in ({}, {"training": True}):
        model = shardconv_runtime.load(out, device="cpu", **options)
        try:
            found.append(float(model(IDS, labels=IDS).loss))
        except PlanError as error:
            found.append(error)
    return found[0], found[1]


@pytest.mark.parametrize("asks", SIZES)
def test_the_loss_is_that_of_one_process(asks: str, tmp_path: Path) -> None:
    config = SizedConfig(asks, **CONFIGS["llama"] | {"num_hidden_layers": 1})
    torch.manual_seed(0)
    model = SizedForCausalLM._from_config(config, dtype=torch.float64).eval()
    source = save(model, tmp_path / "model")
    want = float(transformers.AutoModelForCausalLM.from_pretrained(source)(IDS, labels=IDS).loss)
    shardconv.convert(source, tmp_path / "out", tp=2)
    for found in run_processes(2, losses, tmp_path / "out"):
        for loss in found:
            if asks in REFUSED:
                assert isinstance(loss, PlanError)
                assert str(loss).startswith("labels was given to a model")
            else:
                assert loss == pytest.approx(want, rel=1e-6)


def seq2seq_losses(out: Path) -> float:
    """A loss of a model that gets its logits gathered."""
    model = shardconv_runtime.load(out, device="cpu")
    return float(model(input_ids=IDS, labels=IDS).loss)


def test_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    """Their labels are those of the decoder; the loss was never traced."""
    config = transformers.T5Config(
        vocab_size=100, d_model=64, d_kv=8, d_ff=128, num_layers=1, num_heads=8, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration._from_config(config, dtype=torch.float64).eval()
    source = save(model, tmp_path / "model")
    want = float(type(model).from_pretrained(source)(input_ids=IDS, labels=IDS).loss)
    shardconv.convert(source, tmp_path / "out", tp=2)
    assert run_processes(2, seq2seq_losses, tmp_path / "out") == pytest.approx([want] * 2, rel=1e-6)
