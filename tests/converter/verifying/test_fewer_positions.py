"""Plans of models that see large images are proven on models that see small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from kept_checks import keeping_checks
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import PlanError, SolveError
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.plan import Plan
from torch import nn

from shardconv import passes
from shardconv.arguments import SolveOptions
from shardconv.dim_analysis.rules import RULES
from shardconv.numeric_check import NumericCheck
from shardconv.tracing.trace import trace
from shardconv.verifying import shrink
from shardconv.verifying.proof_case import simulate
from shardconv.verifying.shrink import is_same_code, resized_tensors


@pytest.fixture(scope="module")
def seeing() -> tuple[Plan, NumericCheck]:
    """A model with 576 patches in an image, and what proved its plan."""
    config = transformers.LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "image_size": 336,
            "patch_size": 14,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 8,
            "num_hidden_layers": 3,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_hidden_layers": 3,
            "vocab_size": 1000,
        },
        image_token_index=999,
        multimodal_projector_bias=False,
    )
    with pytest.MonkeyPatch.context() as patch, keeping_checks() as checks:
        patch.setattr(shrink, "_MANY_ACTIVATIONS", 1 << 20)
        spec = ModelSpec("seeing", config, transformers.LlavaForConditionalGeneration, "bfloat16")
        plan = passes.solve_plan(spec, SolveOptions(2))
    return plan, checks[-1]


TABLE = "model.vision_tower.embeddings.position_embedding.weight"


def test_images_of_the_proof_are_small(seeing: tuple[Plan, NumericCheck]) -> None:
    plan, check = seeing
    case = check.case(plan)
    assert check.full.inputs.tensors["pixel_values"].shape[-1] == 336
    assert case.inputs.tensors["pixel_values"].shape[-1] == 84
    assert case.model.get_parameter(TABLE).shape[0] == 37
    assert plan.training is not None
    assert plan.proven_arguments == ("inputs_embeds",)


def test_a_wrong_plan_is_wrong_with_small_images_too(seeing: tuple[Plan, NumericCheck]) -> None:
    plan, check = seeing
    (projection,) = (m for m in plan.modules if "model.multi_modal_projector.linear_2" in m.names)
    assert projection.outputs
    unsummed = replace(projection, outputs=())
    modules = tuple(unsummed if m is projection else m for m in plan.modules)
    with pytest.raises(SolveError, match="the plan is wrong"):
        simulate(check.case(replace(plan, modules=modules)))


def test_a_plan_for_another_number_of_positions_is_refused(seeing: tuple[Plan, NumericCheck]) -> None:
    plan, check = seeing
    (table,) = (p for p in plan.parameters if TABLE in p.names)
    other = replace(table, dims=(Leaf(576), *table.dims[1:]))
    parameters = tuple(other if p is table else p for p in plan.parameters)
    with pytest.raises(PlanError, match=r"the plan is for \(576, 256\), the model has \(577, 256\)"):
        check.case(replace(plan, parameters=parameters))


class Adds(nn.Module):
    """Adds a table of positions, as often as it is told."""

    def __init__(self, positions: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.table = nn.Embedding(positions, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x + self.table.weight
        return x


def test_the_same_code_on_other_sizes_is_the_same_and_other_code_is_not() -> None:
    models = [Adds(12, 1).to("meta"), Adds(5, 1).to("meta"), Adds(5, 2).to("meta")]
    first, same, other = (
        trace(model, {"x": torch.randn(2, model.table.num_embeddings, 8)}, RULES) for model in models
    )
    assert is_same_code(first, same)
    assert not is_same_code(first, other)
    resized = resized_tensors(models[0], models[1])
    assert resized is not None
    assert {n: (r.before, r.after) for n, r in resized.items()} == {"table.weight": ((12, 8), (5, 8))}
    assert resized_tensors(models[0], nn.Linear(2, 2)) is None
