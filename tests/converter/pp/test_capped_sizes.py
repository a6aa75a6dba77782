"""Integers that a layer hands on, as many as there are keys, up to a constant."""

from __future__ import annotations

import pytest
from shardconv_runtime.format.pipeline_stages import PlaceholderDim, PlaceholderTensor, PortDim
from zoo.models import build
from zoo.stages_run import run, specification

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan


@pytest.mark.parametrize("most", [5, 64])
def test_sizes_that_end_at_a_constant(most: int) -> None:
    """The calls of the trace are longer than one constant, and shorter than the other."""
    model = build("causal", "glm_moe_dsa", index_topk=most)
    plan = solve_plan(specification(model), SolveOptions(1, pp=2, check=False))
    assert plan.stages is not None
    tensors = [entry.items[1].tensor for entry in plan.stages.modules if len(entry.items) > 1]
    for tensor in tensors:
        assert isinstance(tensor, PlaceholderTensor)
        assert tensor.dtype == "int32"
        keys = tensor.dims[2]
        assert keys in (
            PlaceholderDim((PortDim("input.attention_mask", 3),), at_most=most),
            PlaceholderDim((PortDim("input.prev_topk_indices", 2),)),
        )
    assert any(tensor is not None and tensor.dims[2].at_most == most for tensor in tensors)


def test_stages_that_hand_on_such_integers_generate_the_same() -> None:
    found = run("causal", "glm_moe_dsa", 2, 2)
    assert (found.status, found.generated) == ("equal", "same")
