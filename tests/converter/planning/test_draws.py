"""Which modules of a plan draw the same random numbers on all ranks, and which do not."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import DrawPlan, Plan

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan


def gpt2(**changes: Any) -> ModelSpec:
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 101, "n_positions": 64}
    config = transformers.GPT2Config(**(sizes | changes))
    return ModelSpec("gpt2", config, transformers.GPT2LMHeadModel, "float64")


def opt_like(**changes: Any) -> ModelSpec:
    """Layers whose own code draws on replicated and on sharded activations."""
    config = transformers.BartConfig(
        encoder_layers=1,
        decoder_layers=1,
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        vocab_size=101,
        max_position_embeddings=64,
        **changes,
    )
    return ModelSpec("bart", config, transformers.BartForConditionalGeneration, "float64")


def entries(plans: tuple[DrawPlan, ...]) -> dict[str, DrawPlan]:
    return {name: plan for plan in plans for name in expand_all(plan.names)}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve_plan(gpt2(), SolveOptions(2, sequence_parallel=True))


def test_attention_by_heads_draws_apart_and_the_residual_in_it_alike(plan: Plan) -> None:
    assert plan.training is not None
    found = entries(plan.training.draws)
    for layer in range(3):
        assert found[f"transformer.h.{layer}.attn"].axes == (0,)
        assert found[f"transformer.h.{layer}.attn.resid_dropout"].axes == ()
    assert not any("mlp" in name for name in found)


def test_between_blocks_split_over_the_sequence_all_draw_apart(plan: Plan) -> None:
    assert plan.training is not None
    assert plan.training.sequence is not None
    found = entries(plan.training.sequence.draws)
    for layer in range(3):
        for name in ("attn", "attn.resid_dropout", "mlp.dropout"):
            assert found[f"transformer.h.{layer}.{name}"].axes == (0,), name


def test_one_rank_changes_no_stream() -> None:
    plan = solve_plan(gpt2(), SolveOptions(1))
    assert plan.training is not None
    assert plan.training.draws == ()


def test_both_kinds_in_one_modules_code_are_told_apart_by_the_modules_it_calls() -> None:
    plan = solve_plan(opt_like(), SolveOptions(2, check=False))
    assert plan.training is not None
    found = entries(plan.training.draws)
    layer = "model.encoder.layers.0"
    assert found[layer] == DrawPlan(found[layer].names)
    assert found[f"{layer}.activation_fn"].afterwards == (0,)
    assert found[f"{layer}.self_attn"].axes == (0,)
    for child in ("self_attn", "fc1", "fc2"):
        assert found[f"{layer}.{child}"].afterwards == ()
    assert not any(entry.mixed for entry in found.values())
