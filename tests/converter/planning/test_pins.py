"""Leaves that get the axes of another plan, and the dims of an adapter that follow them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from shardconv_runtime.adapters.adapter_names import ANY_NAME
from shardconv_runtime.adapters.attaching import Adapter, attach
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.format.dims import Leaf, axes_of
from shardconv_runtime.format.plan import parameter_plans
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.meta.meta_model import build_model

from shardconv.adapted_plan import Adaptation
from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan

CONFIGS: dict[str, Any] = {
    "heads of keys on each rank": transformers.LlamaConfig(num_key_value_heads=8),
    "fewer heads of keys than ranks": transformers.LlamaConfig(num_key_value_heads=2),
    "fused matrices": transformers.Phi3Config(num_key_value_heads=4, pad_token_id=0),
    "experts": transformers.MixtralConfig(num_key_value_heads=4, num_local_experts=4),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_hidden_layers": 2}


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 3, 8])
@pytest.mark.parametrize("kind", CONFIGS)
def test_products_of_an_adapter_are_laid_out_as_the_weight(kind: str, tp: int) -> None:
    config = type(CONFIGS[kind]).from_dict({**CONFIGS[kind].to_dict(), **SIZES, "vocab_size": 128})
    spec = resolve(config, Hub(), need_weights=False)
    base = solve_plan(spec, SolveOptions(tp, check=False))
    adapter = Adapter(LoraConfig(r=4, target_modules="all-linear"))
    plan = solve_plan(spec, SolveOptions(tp, check=False), adaptation=Adaptation(base, adapter))
    assert plan.mesh == base.mesh
    stored, entries = parameter_plans(base), parameter_plans(plan)
    model = build_model(spec.model_class, spec.config, torch.float32)
    names = attach(model, {ANY_NAME: adapter}, trainable=True, initialized=False).base_names
    for now, old in names.items():
        if old in stored:
            assert entries[now].dims == stored[old].dims
    checked = 0
    for name, entry in entries.items():
        owner, found, _ = name.partition(f".lora_A.{ANY_NAME}.")
        weight = entries.get(f"{owner}.base_layer.weight")
        if found and weight is not None:
            other = entries[f"{owner}.lora_B.{ANY_NAME}.weight"]
            assert entry.dims == (Leaf(4), weight.dims[1])
            assert other.dims == (weight.dims[0], Leaf(4))
            checked += any(map(axes_of, weight.dims))
    assert checked >= 8
