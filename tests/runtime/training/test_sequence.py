"""Sequence-parallel models are called as unsharded ones: with any length, for the logits of any positions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.training.prepare import TrainingForm, parallelize_for_training
from torch import Tensor, nn
from zoo.models import build

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan
from shardconv.simulation.model_runs import Float64
from shardconv.simulation.random_weights import RandomWeights, fill
from shardconv.simulation.rank_threads import run_ranks

RANKS = 2
LENGTHS = (12, 13)
TYPES = ("llama", "gpt2")
"""The sequence is gathered inside of the head, or behind the last norm."""


@cache
def solved(model_type: str) -> tuple[Plan, nn.Module, RandomWeights]:
    """A plan, the model on meta, and weights."""
    model = build("seq2seq" if model_type == "t5" else "causal", model_type)
    spec = ModelSpec(model_type, model.config, model.model_class, "float32")
    plan = solve_plan(spec, SolveOptions(RANKS, sequence_parallel=True))
    meta = build_model(model.model_class, copy.deepcopy(model.config), torch.float64)
    weights = RandomWeights(plan)
    weights.put_into(copy.deepcopy(meta), None, torch.float64, gradients=True)
    return plan, meta, weights


def unsharded(model_type: str) -> nn.Module:
    _, meta, weights = solved(model_type)
    return weights.put_into(copy.deepcopy(meta), None, torch.float64, gradients=True).eval()


def on_ranks(model_type: str, call: Callable[[nn.Module], Any], plan: Plan | None = None) -> list[Any]:
    """What a call of the sequence-parallel model gives on each rank."""
    known, meta, weights = solved(model_type)

    def rank(comm: Communicator) -> Any:
        used = plan or known
        model = parallelize_for_training(
            copy.deepcopy(meta),
            used,
            comm,
            TrainingForm(gather_logits=True, sequence_parallel=True),
        )
        model = copy.deepcopy(fill(model, weights.local(comm.rank, torch.float64), gradients=True))
        with Float64():
            return call(model.eval())

    return run_ranks(known.mesh, rank)


def ids_of(length: int) -> Tensor:
    return torch.randint(3, 99, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("model_type", TYPES)
def test_logits_of_some_positions(model_type: str) -> None:
    """Counted from the end, or named; the first ones from the start, or the end."""
    kept = (0, 1, 5, 12, 40, torch.tensor([1, 5, -1]), torch.tensor([0, 11]))
    calls = [(ids_of(length), which) for length in LENGTHS for which in kept]
    full = unsharded(model_type)
    with Float64():
        wanted = [full(ids, logits_to_keep=which).logits for ids, which in calls]

    def call(model: nn.Module) -> list[Tensor]:
        return [model(ids, logits_to_keep=which).logits for ids, which in calls]

    for found in on_ranks(model_type, call):
        for logits, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(logits, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num_kept", [4, 40])
def test_the_loss_of_some_positions(length: int, num_kept: int) -> None:
    ids = ids_of(length)
    labels = ids[:, -num_kept:]

    def call(model: nn.Module) -> tuple[float, Tensor]:
        loss = model(ids, labels=labels, logits_to_keep=num_kept).loss
        (gradient,) = torch.autograd.grad(loss, [model.get_parameter("model.norm.weight")])
        return loss.item(), gradient

    with Float64():
        loss, gradient = call(unsharded("llama"))
    for found in on_ranks("llama", call):
        assert found[0] == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(found[1], gradient, rtol=1e-9, atol=1e-9)


def test_lengths_of_a_decoder_that_cannot_be_sharded_are_refused() -> None:
    def call(model: nn.Module) -> list[str]:
        found = []
        for given in ({"decoder_input_ids": ids_of(13)}, {"labels": ids_of(13)}):
            with pytest.raises(PlanError, match="a decoder's sequence is not padded") as caught:
                model(ids_of(12), **given)
            found.append(str(caught.value))
        with pytest.raises(PlanError, match="13 tokens cannot be sharded over 2 ranks"):
            model(ids_of(13), decoder_input_ids=ids_of(12))
        return found

    found = on_ranks("t5", call)
    assert found[0] == found[1]


def test_two_sequences_of_different_lengths() -> None:
    ids, other = ids_of(12), ids_of(6)
    with Float64():
        want = unsharded("t5")(ids, decoder_input_ids=other)
    for found in on_ranks("t5", lambda model: model(ids, decoder_input_ids=other)):
        torch.testing.assert_close(found.logits, want.logits, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            found.encoder_last_hidden_state, want.encoder_last_hidden_state, rtol=1e-9, atol=1e-9
        )


def test_what_cannot_be_told_apart_is_refused() -> None:
    """As many positions as the padded sequence has would be taken for padded outputs."""

    def call(model: nn.Module) -> str:
        with pytest.raises(PlanError, match="14 positions, as many as the padded sequence") as caught:
            model(ids_of(13), logits_to_keep=torch.arange(14) % 13)
        return str(caught.value)

    assert len(set(on_ranks("llama", call))) == 1
