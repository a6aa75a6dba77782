"""Stored tensors of packed parameters are cut as the weight is, in their own steps, or not at all."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, parse, size, to_text
from shardconv_runtime.format.plan import PackedDim, PackedTensor, Packing, ParameterPlan
from shardconv_runtime.format.slices import local_size, ranges
from shardconv_runtime.format.stored_layout import (
    check_packing,
    granularity,
    is_sharded_between,
    layout_sha256,
    packed_entries,
    stepped,
    stored_plans,
    tensor_name,
)
from small_models import hand_plan, small_config

DIMS = st.recursive(
    st.builds(Leaf, st.integers(1, 12), st.sampled_from([(), (0,)])),
    lambda inner: (
        st.builds(lambda parts: Sum(tuple(parts)), st.lists(inner, min_size=1, max_size=3))
        | st.builds(lambda a, b: Product((a, Leaf(b))), inner, st.integers(1, 8))
    ),
    max_leaves=4,
)


def along(*steps: int) -> tuple[PackedDim, ...]:
    """Dims that run along those of the weight."""
    return tuple(PackedDim(index, step) for index, step in enumerate(steps))


def stored(name: str, *dims: tuple[int, int]) -> dict[str, Any]:
    """A stored tensor as it is in a plan's JSON: (of, step) of its dims."""
    return {"name": name, "dtype": "int8", "dims": [{"of": of, "step": step} for of, step in dims]}


@settings(max_examples=300, deadline=None)
@given(DIMS, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3]))
def test_steps_are_cut_as_positions_or_not_at_all(dim: Dim, step: int, tp: int) -> None:
    packing = Packing(
        "x", (PackedTensor("*", "uint8", along(1)), PackedTensor("scale", "float32", along(step)))
    )
    entry = ParameterPlan(("w",), (dim,), "float32", packing=packing)
    try:
        check_packing(entry, (tp,))
    except PlanError:
        return
    _, scale = packed_entries(entry)
    for rank in range(tp):
        positions = [at for start, stop in ranges(dim, (tp,), rank) for at in range(start, stop)]
        steps = [at for start, stop in ranges(scale.dims[0], (tp,), rank) for at in range(start, stop)]
        assert sorted({at // step for at in positions}) == steps
        assert [step * b + i for b in steps for i in range(step) if step * b + i < size(dim)] == positions


@settings(max_examples=300, deadline=None)
@given(DIMS, st.sampled_from([2, 4, 8]), st.sampled_from([2, 4]), st.sampled_from([2, 3, 4]))
@example(Product((Product((Leaf(1, (0,)), Leaf(8))), Leaf(1))), 2, 4, 2)
def test_what_is_cut_between_steps_is_cut_between_their_parts(
    dim: Dim, inner: int, outer: int, tp: int
) -> None:
    """The solver asks for the common multiple of all steps alone."""
    if is_sharded_between(dim, inner * outer, (tp,)) and size(dim) % (inner * outer) == 0:
        assert is_sharded_between(dim, inner, (tp,))


@pytest.mark.parametrize(
    ("dim", "step", "expected"),
    [
        ("90@0*32", 32, "90@0"),
        ("90@0*32", 8, "90@0*4"),
        ("231@0*128", 8, "231@0*16"),
        ("32@0*128", 256, "16@0"),
        ("6@0*192", 128, "9@0"),  # heads of one and a half steps
        ("8@0*64 + 4@0*64", 32, "8@0*2 + 4@0*2"),
        ("100", 8, "13"),
    ],
)
def test_steps_of_a_dim(dim: str, step: int, expected: str) -> None:
    assert to_text(stepped(parse(dim), step)) == expected


@pytest.mark.parametrize(
    ("dim", "step", "tp", "shares"),
    [
        ("90@0*32", 32, 4, [23, 23, 22, 22]),
        ("90@0*32", 32, 8, [12, 12] + [11] * 6),
        ("231@0*128", 128, 2, [116, 115]),
    ],
)
def test_odd_numbers_of_groups_are_shared_unevenly(dim: str, step: int, tp: int, shares: list[int]) -> None:
    assert is_sharded_between(parse(dim), step, (tp,))
    assert [local_size(stepped(parse(dim), step), (tp,), rank) for rank in range(tp)] == shares


def test_the_granularity_is_the_common_multiple_of_all_steps() -> None:
    tensors = (
        PackedTensor("weight_packed", "int32", along(1, 8)),
        PackedTensor("weight_scale", "bfloat16", along(1, 12)),
        PackedTensor("weight_shape", "int64", (PackedDim(None, 2),)),
    )
    assert granularity(Packing("x", tensors), 2) == (1, 24)


@pytest.mark.parametrize(
    ("parameter", "name", "expected"),
    [
        ("h.{0..3}.up.weight", "qweight", "h.{0..3}.up.qweight"),
        ("h.0.experts.gate_up_proj", "*_scale_inv", "h.0.experts.gate_up_proj_scale_inv"),
        ("h.0.up.weight", "*.quant_state.bitsandbytes__nf4", "h.0.up.weight.quant_state.bitsandbytes__nf4"),
        ("w", "*", "w"),
    ],
)
def test_names_of_stored_tensors(parameter: str, name: str, expected: str) -> None:
    assert tensor_name(parameter, name) == expected


def test_a_packed_plan_is_written_and_read() -> None:
    packing = Packing(
        "awq",
        (PackedTensor("qweight", "int32", (PackedDim(1, 1), PackedDim(0, 2)), (64, 2)),),
        (("bits", 4),),
    )
    entry = ParameterPlan(("h.up.weight",), (Leaf(4, (0,)), Leaf(64)), "bfloat16", packing=packing)
    plan = hand_plan(small_config(), 2)
    packed = replace(plan, parameters=(*plan.parameters, entry))
    again = plan_json.loads(plan_json.dumps(packed))
    assert again == packed
    stored = stored_plans(again)
    assert "h.up.weight" not in stored
    assert [math.prod(map(size, stored["h.up.qweight"].dims))] == [128]
    assert layout_sha256(again) != layout_sha256(plan)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([], r"tensors: must be 1 to 16"),
        ([stored("q", (2, 1))], r"tensors\[0\].dims\[0\].of: the weight has 2 dims"),
        ([stored("q", (0, 0))], r"tensors\[0\].dims\[0\].step: must be 1"),
        ([stored("q", (0, 1), (0, 1))], r"tensors\[0\].dims: two of them run along one dim"),
        ([stored("", (0, 1), (1, 1))], r"name: is no name"),
        ([stored("a/b", (0, 1), (1, 1))], r"name: is no name"),
        ([stored("q", (0, 1), (1, 1)) | {"dtype": "int33"}], r"dtype"),
        ([stored("q", (0, 1), (1, 1))] * 2, r"two of them have one name"),
        ([stored("q", (0, 1), (1, 1)) | {"checkpoint_shape": [3, 3]}], r"checkpoint_shape: has not as many"),
        ([stored("q", (0, 4), (1, 1))], r"sharded inside of the 4 positions for which q \(x\) has one"),
    ],
)
def test_wrong_packings_are_refused(tensors: list[dict[str, Any]], problem: str) -> None:
    right = Packing("x", (PackedTensor("q", "int8", along(1, 1)),))
    entry = ParameterPlan(("h.up.weight",), (Leaf(6, (0,)), Leaf(8)), "bfloat16", packing=right)
    plan = hand_plan(small_config(), 2)
    document = json.loads(plan_json.dumps(replace(plan, parameters=(*plan.parameters, entry))))
    document["parameters"][-1]["packing"]["tensors"] = tensors
    with pytest.raises(PlanError, match=problem):
        plan_json.loads(json.dumps(document))
