"""Depth is free: a deep model is analysed as a model with each kind of layer once or twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from shardconv_runtime.lazy import build_model
from shardconv_runtime.names import expand_all
from shardconv_runtime.sources.spec import ModelSpec

from shardconv.analysing.rules import RULES
from shardconv.pipeline import solve_plan
from shardconv.tracing.fold import fold
from shardconv.tracing.inputs import trace_inputs

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(num_layers: int) -> ModelSpec:
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=num_layers)
    return ModelSpec("llama", config, transformers.LlamaForCausalLM, "float32")


def num_events(spec: ModelSpec) -> tuple[int, int]:
    """Of the whole tape and of the folded one; the trace has a cache."""
    inputs, tape = trace_inputs(build_model(spec.model_class, spec.config, torch.float32), RULES)
    assert inputs.options == {"use_cache": True}
    return len(tape.events), len(fold(tape).tape.events)


def test_a_deep_model_is_as_small_as_a_shallow_one() -> None:
    whole, folded = num_events(llama(24))
    assert folded == num_events(llama(6))[1]
    assert folded < whole / 6


@pytest.mark.parametrize("num_layers", [2, 3, 9])
def test_the_plan_is_for_all_layers(num_layers: int) -> None:
    plan = solve_plan(llama(num_layers), 2)
    rows = [n for m in plan.modules if m.category == "row" for n in expand_all(m.names)]
    assert len(rows) == 2 * num_layers
    assert {n.split(".")[2] for n in rows} == {str(i) for i in range(num_layers)}
