"""Adapters train copies of an embedding or of a head (``modules_to_save``), and the model ties both.

peft wraps each module by itself, and its warning recommends ``ensure_weight_tying``, with which the copies
are tied, too. With the adapter, without it, merged, unloaded and trained, the model is that of one process.
Reports: peft#2777 (merged models generate nonsense), peft#2864, peft#2018, unsloth#9331 (a trained head was
lost), unsloth#3711 (tied copies came apart).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime.errors import SourceError
from small_models import save_random, small_config
from torch import Tensor

import shardconv
from shardconv.converted.adapt import adapt

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
BASES: Mapping[str, tuple[Any, Any]] = {
    "decoder": (small_config(tie_word_embeddings=True), transformers.LlamaForCausalLM),
    "one matrix of in by out": (
        transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=4, vocab_size=101, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        ),
        transformers.GPT2LMHeadModel,
    ),
    "encoder and decoder": (
        transformers.T5Config(
            num_layers=1,
            d_model=32,
            d_ff=48,
            num_heads=4,
            d_kv=8,
            vocab_size=101,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        ),
        transformers.T5ForConditionalGeneration,
    ),
}


def lora(*modules: str, target: str = "q_proj", task: str = "CAUSAL_LM", **options: Any) -> Any:
    return peft.LoraConfig(
        target_modules=[target], modules_to_save=list(modules) or None, r=4, task_type=task, **options
    )


LOST = "table that no module calls"
"""Merged, it differs from those that are called, and transformers cannot load what it saves then."""
CASES: Mapping[str, tuple[str, Any]] = {
    "head": ("decoder", lora("lm_head")),
    "head and norm": ("decoder", lora("lm_head", "norm")),
    "embedding": ("decoder", lora("embed_tokens")),
    "embedding, tied": ("decoder", lora("embed_tokens", ensure_weight_tying=True)),
    "both": ("decoder", lora("embed_tokens", "lm_head")),
    "both, tied": ("decoder", lora("embed_tokens", "lm_head", ensure_weight_tying=True)),
    "head of gpt2": ("one matrix of in by out", lora("lm_head", target="c_attn", fan_in_fan_out=True)),
    "head of t5": ("encoder and decoder", lora("lm_head", target="q", task="SEQ_2_SEQ_LM")),
    LOST: ("encoder and decoder", lora("shared", target="q", task="SEQ_2_SEQ_LM")),
}

Load = Callable[[bool], Any]
"""The model with the adapter, trainable or not."""


@torch.no_grad()
def logits(model: Any) -> Tensor:
    given = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    found: Tensor = model(input_ids=IDS, **given).logits
    return found


def without_adapter(model: Any) -> Tensor:
    with model.disable_adapter():
        return logits(model)


def train(model: Any) -> Tensor:
    """The loss of a step."""
    loss = model.train()(input_ids=IDS, labels=IDS).loss
    loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
    model.eval()
    return loss.detach().view(1)  # type: ignore[no-any-return]


def states(load: Load) -> dict[str, Tensor]:
    """What the model gives in each of its states."""
    model = load(False).eval()
    found = {"on": logits(model), "off": without_adapter(model), "on again": logits(model)}
    found["merged"] = logits(model.merge_and_unload())
    found["unloaded"] = logits(load(False).eval().unload())
    model = load(True)
    return found | {"loss": train(model), "trained": logits(model), "trained, off": without_adapter(model)}


def saved(name: str, root: Path) -> Path:
    """A random adapter."""
    base, config = CASES[name]
    torch.manual_seed(3)
    model = peft.get_peft_model(BASES[base][1].from_pretrained(root / base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    model.save_pretrained(root / name)
    return root / name


def on_rank(root: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, (base, _) in CASES.items():
        out, adapter = root / f"{base}-out", root / f"{name}-out"

        def load(training: bool, out: Path = out, adapter: Path = adapter) -> Any:
            return shardconv_runtime.load(out, adapter=adapter, training=training)

        found[name] = states(load)
        if name != LOST:
            load(False).merge_and_unload().save_pretrained(root / f"{name}-merged")
        trained = load(True)
        train(trained)
        trained.save_pretrained(root / f"{name}-trained")
    return found


def require_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys()
    for state, tensor in wanted.items():
        assert torch.allclose(found[state], tensor, atol=1e-4 * max(1, float(tensor.abs().max()))), (
            what,
            state,
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied")
    for name, (config, cls) in BASES.items():
        save_random(config, cls, path / name)
        shardconv.convert(path / name, path / f"{name}-out", tp=2, check=False)
    return path


def test_all_states_are_those_of_one_process(root: Path) -> None:
    for name, (base, _) in CASES.items():
        adapt(root / f"{base}-out", saved(name, root), root / f"{name}-out")
    ranks = run_processes(2, on_rank, root)
    for name, (base, _) in CASES.items():
        cls = BASES[base][1]

        def load(training: bool, directory: Path, base: str = base, cls: Any = cls) -> Any:
            model = cls.from_pretrained(root / base)
            return peft.PeftModel.from_pretrained(model, directory, is_trainable=training)

        wanted = states(lambda training, load=load, name=name: load(training, root / name))  # type: ignore[misc]
        for found in ranks:
            require_equal(found[name], wanted, name)
        again = {"trained": logits(load(False, root / f"{name}-trained").eval())}
        if name != LOST:
            again["merged"] = logits(cls.from_pretrained(root / f"{name}-merged"))
        require_equal(again, {state: wanted[state] for state in again}, name)


def switch(root: Path) -> list[Tensor]:
    adapters = {"with a head": root / "a-out", "without": root / "b-out"}
    return switched(shardconv_runtime.load(root / "decoder-out", adapter=adapters, training=True))


def switched(model: Any) -> list[Tensor]:
    """The states of a model with two adapters, one of which has a copy of the head."""
    found = []
    for name in ("without", "with a head"):
        model.set_adapter(name)
        found += [train(model), logits(model), without_adapter(model)]
    return found


def test_several_adapters(root: Path) -> None:
    """Of which one has a copy of the head; each is trained for a step."""
    base = root / "decoder"
    for number, (name, config) in enumerate({"a": lora("lm_head"), "b": lora()}.items()):
        torch.manual_seed(number)
        model = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), config)
        model.save_pretrained(root / name)
        adapt(root / "decoder-out", root / name, root / f"{name}-out")
    one = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(base), root / "a", "with a head", is_trainable=True
    )
    one.load_adapter(root / "b", "without", is_trainable=True)
    wanted = switched(one)
    for found in run_processes(2, switch, root):
        for each, reference in zip(found, wanted, strict=True):
            assert torch.allclose(each, reference, atol=1e-4)


def test_products_that_are_tied_are_refused(root: Path, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(root / "decoder")
    config = lora(target="embed_tokens", ensure_weight_tying=True)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(SourceError, match="cannot be sharded; leave ensure_weight_tying out"):
        adapt(root / "decoder-out", tmp_path / "adapter", tmp_path / "out")
