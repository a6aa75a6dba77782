"""The forms of a plan that a caller may ask for, and what is in their way."""

from __future__ import annotations

import dataclasses

import pytest
from converted import llama_plan, random_llama
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.plan import PackedDim, PackedTensor, Packing, ParameterPlan, Plan
from shardconv_runtime.loading.load_options import require_form


@pytest.fixture
def packed() -> Plan:
    """A plan with a matrix in blocks of float8."""
    stored = PackedTensor("*", "float8_e4m3fn", (PackedDim(0, 1), PackedDim(1, 1)))
    factors = PackedTensor("*_scale_inv", "float32", (PackedDim(0, 16), PackedDim(1, 16)))
    entry = ParameterPlan(
        ("matrix",), (Leaf(40), Leaf(48)), "bfloat16", packing=Packing("fp8", (stored, factors))
    )
    plan = llama_plan(random_llama().config, (1,), "bfloat16")
    return dataclasses.replace(plan, parameters=(*plan.parameters, entry))


def test_packed_weights_are_not_read_in_parts(packed: Plan) -> None:
    """A part of one cannot be dequantized; whether they would stay packed is asked first."""
    with pytest.raises(PlanError, match=r"data_parallel=: packed weights \(fp8\) are dequantized as whole"):
        require_form(packed, training=True, sequence_parallel=False, stays_packed=False, in_parts=True)
    with pytest.raises(PlanError, match="pass dequantize=True"):
        require_form(packed, training=True, sequence_parallel=False, stays_packed=True, in_parts=True)
