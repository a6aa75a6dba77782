"""Calls beside a forward pass on ids, in real processes: as of the unsharded model, or refused everywhere."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_errors, run_processes
from shardconv_runtime import Communication, PlanError
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from zoo.measure import difference
from zoo.saved import save_random

import shardconv

QUICK = ("causal gpt2", "seq2seq bart")
TYPES = (*QUICK, "causal cohere", "causal llama", "masked bert", "seq2seq t5")
"""Some reduce embeddings behind a sum, a dropout or a norm; some have an embedding that is not called."""
PARTS = "causal cohere"
"""Its hidden states stay terms of a sum from layer to layer."""
TOLERANCE = 1e-9


def ids(length: int = 7) -> Tensor:
    """Two rows of ids from the whole vocabulary of the zoo's models."""
    return torch.randint(3, 250, (2, length), generator=torch.Generator().manual_seed(length))


def embeddings(width: int, length: int = 7) -> Tensor:
    """Embeddings that no table has ``[2, length, width]``."""
    rng = torch.Generator().manual_seed(5)
    return torch.randn(2, length, width, generator=rng, dtype=torch.float64)


def calls(model: Any, encoded: Tensor | None = None) -> dict[str, list[Tensor]]:
    """What each way of calling a model gives.

    Args:
        model: unsharded, or of one rank.
        encoded: what the unsharded encoder returns, if there is one.
    """
    table = model.get_input_embeddings()
    width = model.config.hidden_size
    given = {"inputs_embeds": embeddings(width)}
    out = {"embedding": [table(ids())]}
    if model.config.is_encoder_decoder:
        encoder, decoder = model.get_encoder(), model.get_decoder()
        own = encoder(input_ids=ids()).last_hidden_state
        hidden = BaseModelOutput(last_hidden_state=own if encoded is None else encoded)
        given = {"decoder_input_ids": ids(5), "inputs_embeds": embeddings(width)}
        target = {"input_ids": ids(), "decoder_inputs_embeds": embeddings(width, 5)}
        out |= {
            "encoder": [own],
            "encoder, embeddings": [encoder(inputs_embeds=embeddings(width)).last_hidden_state],
            "encoder outputs": [model(encoder_outputs=hidden, decoder_input_ids=ids(5)).logits],
            "decoder embeddings": [model(**target).logits],
            "embedding of the encoder": [encoder.get_input_embeddings()(ids())],
            "embedding of the decoder": [decoder.get_input_embeddings()(ids())],
        }
    else:
        out["base model"] = [model.base_model(inputs_embeds=embeddings(width))[0]]
    out["embeddings"] = [model(**given).logits]
    given["inputs_embeds"] = table(ids())
    out["embeddings of ids"] = [model(**given).logits]
    if model.can_generate():
        out["generated"] = [_generated(model, embeddings(width))]
    out["embedding, again"] = [table(ids())]
    return out


def _generated(model: Any, embeds: Tensor) -> Tensor:
    given: dict[str, Any] = {"inputs_embeds": embeds, "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    if model.config.is_encoder_decoder:
        given["decoder_start_token_id"] = 0
    tokens: Tensor = model.generate(**given, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    return tokens


def calls_on_rank(path: Path, encoded: Tensor | None) -> dict[str, list[Tensor]]:
    with torch.no_grad():
        return calls(shardconv_runtime.load(path, communication=Communication(timeout_s=60)), encoded)


def converted(name: str, path: Path, **options: Any) -> tuple[Any, Path]:
    """The unsharded model, and its conversion for two ranks."""
    unsharded = save_random(*name.split(), path / "in")
    shardconv.convert(path / "in", path / "out", tp=2, **options)
    return unsharded, path / "out"


@pytest.mark.parametrize(
    "name", [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in TYPES]
)
def test_embeddings_and_encoder(tmp_path: Path, name: str) -> None:
    unsharded, out = converted(name, tmp_path)
    with torch.no_grad():
        want = calls(unsharded)
    encoded = want["encoder"][0] if "encoder" in want else None
    for got in run_processes(2, calls_on_rank, out, encoded):
        assert {way: difference(got[way], want[way]) <= TOLERANCE for way in want} == dict.fromkeys(
            want, True
        )


def embedding_after_error(path: Path) -> Tensor:
    """What the embedding gives when a forward pass has failed."""
    model = shardconv_runtime.load(path, communication=Communication(timeout_s=60))
    with pytest.raises(RuntimeError):
        model(ids(), attention_mask=torch.ones(5, 5, 5))
    with torch.no_grad():
        found: Tensor = model.get_input_embeddings()(ids())
    return found


def test_a_failed_forward_pass_leaves_the_embedding_right(tmp_path: Path) -> None:
    unsharded, out = converted("causal gpt2", tmp_path)
    want = unsharded.get_input_embeddings()(ids())
    for got in run_processes(2, embedding_after_error, out):
        assert torch.equal(got, want)


def given_embeddings(path: Path) -> None:
    shardconv_runtime.load(path, communication=Communication(timeout_s=60))(inputs_embeds=embeddings(64))


def given_embeddings_with_gradient(path: Path) -> None:
    model = shardconv_runtime.load(path, training=True, communication=Communication(timeout_s=60))
    model(inputs_embeds=embeddings(64).requires_grad_())


def test_embeddings_are_refused_without_a_proof(tmp_path: Path) -> None:
    out = converted("causal gpt2", tmp_path, check=False)[1]
    for error in run_errors(2, given_embeddings, out):
        assert isinstance(error, PlanError)
        assert "inputs_embeds" in str(error)
        assert "shardconv reshard" in str(error)


def test_embeddings_with_partial_gradients_are_refused(tmp_path: Path) -> None:
    out = converted("causal gpt2", tmp_path)[1]
    for error in run_errors(2, given_embeddings_with_gradient, out):
        assert isinstance(error, PlanError)
        assert "detach" in str(error)


def hidden_states(model: Any) -> list[Tensor]:
    """All hidden states of a call, and of the steps of a generation."""
    with torch.no_grad():
        states = list(model(ids(), output_hidden_states=True).hidden_states)
        states += model(ids(), output_hidden_states=True, return_dict=False)[-1]
        made = model.generate(
            ids(), max_new_tokens=3, do_sample=False, output_hidden_states=True, return_dict_in_generate=True
        )
    return states + [x for step in made.hidden_states for x in step]


def hidden_states_on_rank(path: Path) -> list[Tensor]:
    return hidden_states(shardconv_runtime.load(path, communication=Communication(timeout_s=60)))


@pytest.mark.parametrize("name", ["causal llama", PARTS])
def test_hidden_states(name: str, tmp_path: Path) -> None:
    unsharded, out = converted(name, tmp_path)
    want = hidden_states(unsharded)
    for got in run_processes(2, hidden_states_on_rank, out):
        assert difference(got, want) <= TOLERANCE


def loss_of_hidden_states(model: Any) -> list[Tensor]:
    """Norms of gradients by a loss that tells hidden states, positions and features apart."""
    states = model(ids(), output_hidden_states=True).hidden_states
    states[0].retain_grad()
    losses = [x.pow(3).mean((0, 1)) @ torch.arange(1.0, x.shape[-1] + 1, dtype=x.dtype) for x in states]
    (torch.stack(losses) @ torch.arange(1.0, len(losses) + 1, dtype=losses[0].dtype)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return [norm, states[0].grad, *(p.grad for n, p in model.named_parameters() if n.endswith("norm.weight"))]


def loss_of_hidden_states_on_rank(path: Path) -> list[Tensor]:
    return loss_of_hidden_states(shardconv_runtime.load(path, training=True, dtype=torch.float64))


@pytest.mark.parametrize("name", ["causal llama", PARTS])
def test_a_loss_of_hidden_states(name: str, tmp_path: Path) -> None:
    unsharded, out = converted(name, tmp_path)
    want = loss_of_hidden_states(unsharded)
    for got in run_processes(2, loss_of_hidden_states_on_rank, out):
        assert difference(got, want) <= TOLERANCE


def states_of_a_part(path: Path) -> list[Tensor]:
    """Of the base model, asked by its config; what a hook on a layer is given and gives back; of a module."""
    model: Any = shardconv_runtime.load(path, communication=Communication(timeout_s=60))
    given: list[Tensor] = []

    def double(module: Any, args: Any, output: Any) -> Any:
        given.append(output if isinstance(output, Tensor) else output[0])
        return given[-1] * 2 if isinstance(output, Tensor) else (given[-1] * 2, *output[1:])

    with torch.no_grad():
        model.base_model.config.output_hidden_states = True
        states = list(copy.deepcopy(model.base_model)(ids()).hidden_states)
        model.base_model.config.output_hidden_states = False
        model.base_model.layers[0].register_forward_hook(double)
        logits = model(ids()).logits
        by_itself = model.base_model.layers[0].mlp(embeddings(model.config.hidden_size))
        with pytest.raises(RuntimeError):
            model.base_model.layers[0](embeddings(model.config.hidden_size)[..., 1:])
        model.base_model.layers[0].mlp.register_forward_hook(lambda module, args, output: output.tanh())
        hooked = model.base_model.layers[0].mlp(embeddings(model.config.hidden_size))
        return [*states, logits, given[0], by_itself, hooked]


def test_states_of_a_part_and_hooks_on_layers(tmp_path: Path) -> None:
    unsharded, out = converted(PARTS, tmp_path)
    states = hidden_states(unsharded)[: unsharded.config.num_hidden_layers + 1]
    unsharded.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    with torch.no_grad():
        by_itself = unsharded.model.layers[0].mlp(embeddings(unsharded.config.hidden_size))
        want = [*states, unsharded(ids()).logits, states[1], by_itself, by_itself.tanh()]
    for got in run_processes(2, states_of_a_part, out):
        assert difference(got, want) <= TOLERANCE


def trained_with_hooks(model: Any) -> list[Tensor]:
    """The loss and the norm of gradients of a model with hooks that change what a layer gets and gives."""
    layers = model.base_model.layers
    layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
    layers[0].register_forward_hook(lambda module, args, output: output + output.tanh())
    loss = model(ids()).logits.pow(2).mean()
    loss.backward()
    return [loss.detach(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)]


def trained_with_hooks_on_rank(path: Path) -> list[Tensor]:
    return trained_with_hooks(shardconv_runtime.load(path, training=True, dtype=torch.float64))


def test_hooks_on_terms_of_a_sum_are_trained_through(tmp_path: Path) -> None:
    unsharded, out = converted(PARTS, tmp_path)
    want = trained_with_hooks(unsharded)
    for got in run_processes(2, trained_with_hooks_on_rank, out):
        assert difference(got, want) <= TOLERANCE


def states_without_ports(path: Path, training: bool) -> None:
    """A plan that does not say how tensors between modules are held."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    plan = replace(shardconv.plan(path, tp=2), hooks=())
    options: dict[str, Any] = {"communication": Communication(timeout_s=60), "training": training}
    shardconv_runtime.parallelize(model, plan=plan, **options)(ids(), output_hidden_states=True)


@pytest.mark.parametrize("training", [False, True])
def test_unknown_parts_of_hidden_states_are_refused(training: bool, tmp_path: Path) -> None:
    save_random(*PARTS.split(), tmp_path)
    for error in run_errors(2, states_without_ports, tmp_path, training):
        assert isinstance(error, PlanError)
        assert "output_hidden_states" in str(error)
