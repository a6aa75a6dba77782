"""Modules that code bypasses in training are no boundaries: plans of such models can be trained."""

from __future__ import annotations

import models
import torch
import torch.nn.functional as F
from shardconv_runtime.format.plan import module_plans, parameter_plans
from torch import Tensor, nn

from shardconv.inputs.trace_inputs import TraceInputs, not_in_training
from shardconv.tracing.trace import trace


class Bounded(nn.Module):
    """In training, a small matrix is bounded, and multiplied with outside of its module."""

    def __init__(self, config: models.OddConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.girth)
        self.few = nn.Linear(config.width, 1, bias=False)
        self.down = nn.Linear(config.girth, config.width)

    def forward(self, x: Tensor) -> Tensor:
        factor = F.linear(x, self.few.weight.clamp(-9, 9)) if self.training else self.few(x)
        down: Tensor = self.down(F.silu(self.up(x)) * factor)
        return down


class BoundedModel(models.OddModel):
    mlp = Bounded


def test_calls_of_both_modes_are_compared() -> None:
    with torch.device("meta"):
        model = BoundedModel(models.OddConfig()).eval()
    inputs = TraceInputs({"input_ids": torch.arange(6)[None]}, {})
    tape = trace(model, inputs.tensors, ())
    assert not_in_training(tape, model, inputs) == {"stack.0.chewer.few", "stack.1.chewer.few"}
    assert not any(module.training for module in model.modules())


def test_a_bypassed_module_has_no_steps_and_its_gradient_is_summed_around_it() -> None:
    plan = models.plan_of(BoundedModel, 2)
    assert plan.inference_only == ""
    assert plan.training is not None
    entry = parameter_plans(plan)["stack.0.chewer.few.weight"]
    assert (entry.grad_axes, entry.grad_levels) == ((0,), 1)
    assert "stack.0.chewer.few" not in module_plans(plan)
