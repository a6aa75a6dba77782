"""A plan is solved for one implementation of attention and experts; what it says of the others."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.plan import Plan
from torch import Tensor, nn

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan

pytestmark = pytest.mark.usefixtures("other_attentions")

WIDTHS = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def plan_for(attention: str, **changes: Any) -> Plan:
    config = transformers.MixtralConfig(**(WIDTHS | changes), num_local_experts=4)
    config._attn_implementation = attention
    cls = transformers.MixtralForCausalLM
    return solve_plan(ModelSpec("mixtral", config, cls, "float32"), SolveOptions(4))


def test_one_plan_for_eager_and_fused_attention() -> None:
    eager, fused = plan_for("eager"), plan_for("sdpa")
    assert eager.parameters == fused.parameters
    assert eager.modules == fused.modules
    assert eager.notes == fused.notes == ()


class Choosy(nn.Module):
    """Attention whose plain implementation computes with the number of heads, which a rank has fewer of."""

    def __init__(self, config: models.OddConfig) -> None:
        super().__init__()
        self.inner = models.Plain(config)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * self.inner.quux if self.config._attn_implementation == "eager" else y


class ChoosyModel(models.OddModel):
    mixer = Choosy
    _supports_sdpa = True


def test_an_implementation_that_the_plan_does_not_hold_for_is_named() -> None:
    spec = models.spec(ChoosyModel)
    config = copy.deepcopy(spec.config)
    config._attn_implementation = "sdpa"
    plan = solve_plan(ModelSpec(spec.name, config, spec.model_class, spec.dtype), SolveOptions(2))
    (note,) = [n for n in plan.notes if "implemented as" in n]
    assert note.startswith("this plan is for attention implemented as 'sdpa', not as 'eager': ")
    assert (plan.wrong_attention, plan.wrong_experts) == (("eager",), ())
    config._attn_implementation = "eager"
    other = solve_plan(ModelSpec(spec.name, config, spec.model_class, spec.dtype), SolveOptions(2))
    assert not [n for n in other.notes if "implemented as" in n]


@pytest.mark.parametrize("chosen", ["grouped_mm", "batched_mm", "eager"])
def test_experts_in_every_implementation(chosen: str) -> None:
    config = transformers.MixtralConfig(**WIDTHS, num_local_experts=4)
    config._experts_implementation = chosen
    plan = solve_plan(
        ModelSpec("mixtral", config, transformers.MixtralForCausalLM, "float32"), SolveOptions(2)
    )
    assert not [n for n in plan.notes if "implemented as" in n]
    assert torch.Size(plan.mesh) == (2,)
