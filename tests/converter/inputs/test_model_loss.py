"""Which models return the loss that their loss function computes: without numbers, nothing else tells."""

from __future__ import annotations

import pytest
import torch
from shardconv_runtime.meta.meta_model import build_model
from zoo.models import build

from shardconv.dim_analysis.rules import RULES
from shardconv.inputs.trace_inputs import returns_its_loss_function, trace_inputs


@pytest.mark.parametrize(("model_type", "expected"), [("llama", True), ("bart", False)])
def test_the_loss_that_is_returned(model_type: str, expected: bool) -> None:
    """The second has the function, and computes a loss of its own."""
    zoo = build("causal", model_type)
    model = build_model(zoo.model_class, zoo.config, torch.float32)
    inputs, _ = trace_inputs(model, RULES)
    assert returns_its_loss_function(model, inputs) is expected
