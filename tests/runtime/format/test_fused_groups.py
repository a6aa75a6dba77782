"""Groups of fused layers in plans: what is refused, and which tensors lie next to each other in files."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shardconv_runtime.errors import PlanError
from shardconv_runtime.files.shard_files import shard_files
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import Dim, Leaf
from shardconv_runtime.format.fused_groups import adjacent_tensors, fused_groups, in_units
from shardconv_runtime.format.module_steps import AllGatherStep, AllReduceStep
from shardconv_runtime.format.plan import (
    CodeInfo,
    FusedPlan,
    ModelInfo,
    ModulePlan,
    PackedDim,
    PackedTensor,
    Packing,
    ParameterPlan,
    Plan,
)

SHARDED, WHOLE = Leaf(4, (0,)), Leaf(8)


def group(*members: str) -> FusedPlan:
    return FusedPlan(tuple((member,) for member in members))


def parameter(name: str, *dims: Dim, **changes: object) -> ParameterPlan:
    return ParameterPlan((name,), dims, "float32", **changes)  # type: ignore[arg-type]


PLAN = Plan(
    tp=2,
    mesh=(2,),
    model=ModelInfo("package.modeling:Model", "float32", 100),
    code=CodeInfo("2", "5", (), "0" * 64),
    parameters=(
        parameter("{0..2}.a.weight", SHARDED, WHOLE),
        parameter("{0..2}.b.weight", SHARDED, WHOLE),
        parameter("{0..2}.a.bias", SHARDED),
        parameter("{0..2}.b.bias", SHARDED),
        parameter("row.weight", WHOLE, SHARDED),
        parameter("other.weight", SHARDED, Leaf(6)),
        parameter("whole.weight", WHOLE, WHOLE),
        parameter("norm.weight", WHOLE),
        parameter("gathered.weight", SHARDED, WHOLE),
        parameter("summed.weight", SHARDED, WHOLE),
        parameter("plain.weight", SHARDED, WHOLE),
        parameter("term.weight", SHARDED, WHOLE, partial=()),
    ),
    modules=(
        ModulePlan(("{0..2}.a", "{0..2}.b", "plain"), "column"),
        ModulePlan(("row",), "row"),
        ModulePlan(("gathered",), "column", outputs=(AllGatherStep("output", -1, SHARDED),)),
        ModulePlan(("summed",), "row", outputs=(AllReduceStep("output", (0,)),)),
    ),
    fused=(group("{0..2}.a", "{0..2}.b"),),
)
"""Two layers with biases in each of three blocks, and others that cannot be fused with them."""


def test_a_plan_with_groups_comes_back() -> None:
    assert plan_json.loads(plan_json.dumps(PLAN)) == PLAN
    assert fused_groups(PLAN) == (("0.a", "0.b"), ("1.a", "1.b"), ("2.a", "2.b"))


def test_a_gather_of_the_output_may_follow() -> None:
    plan = replace(PLAN, fused=(group("gathered", "plain"),))
    assert plan_json.loads(plan_json.dumps(plan)) == plan


@pytest.mark.parametrize(
    ("fused", "message"),
    [
        (group("0.a"), r"^fused\[0\].members: needs two members or more"),
        (group("{0..2}.a", "{0,1}.b"), r"^fused\[0\].members: needs two members or more, of as many groups"),
        (FusedPlan(()), r"^fused\[0\].members: needs two"),
        (FusedPlan(((), ())), r"^fused\[0\].members: needs two"),
        (group("0.a", "0.a"), "^fused: '0.a' is a member twice"),
        (group("0.a", "z"), "^fused: a member of .* has no matrix"),
        (group("0.a", "norm"), "^fused: a member of .* has no matrix"),
        (group("0.a", "plain"), "^fused: some members of .* have a bias, others have none"),
        (group("plain", "row"), "^fused: 'row' is no column-parallel layer"),
        (group("plain", "summed"), "^fused: 'summed' is no column-parallel layer"),
        (group("plain", "other"), "^fused: the members of .* have inputs of different sizes"),
        (group("plain", "whole"), "^fused: some members of .* are replicated, others are not"),
        (group("plain", "{a"), "malformed name pattern"),
    ],
)
def test_what_is_refused(fused: FusedPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_json.dumps(replace(PLAN, fused=(fused,)))


def test_tied_parameters_and_terms_of_sums_are_refused() -> None:
    tied = replace(PLAN, fused=(group("plain", "gathered"),), tied=(("alias.weight", "plain.weight"),))
    with pytest.raises(PlanError, match=r"^fused: 'plain\.weight' is tied"):
        plan_json.dumps(tied)
    partial = tuple(
        replace(p, dims=(Leaf(4), WHOLE), partial=(0,)) if p.names == ("term.weight",) else p
        for p in PLAN.parameters
    )
    with pytest.raises(PlanError, match="gives terms of a sum"):
        plan_json.dumps(replace(PLAN, parameters=partial, fused=(group("plain", "term"),)))


@pytest.mark.parametrize("max_file_size", [1, 130, 10**9])
def test_parameters_of_a_group_lie_next_to_each_other_in_one_file(max_file_size: int) -> None:
    for file in shard_files(PLAN, (None, 0, 1), max_file_size):
        names = list(file.layout.offsets)
        for index, first in enumerate(names):
            block, _, rest = first.partition(".")
            if rest.startswith("a."):
                assert names[index + 1] == f"{block}.b.{rest[2:]}"


def test_units() -> None:
    assert list(in_units("abcde", [("d", "b"), ("c", "x")])) == [("a",), ("d", "b"), ("c",), ("e",)]
    assert list(in_units("ab", [])) == [("a",), ("b",)]


def test_what_is_stored_in_different_dtypes_is_not_adjacent() -> None:
    assert adjacent_tensors(PLAN)[:2] == (("0.a.weight", "0.b.weight"), ("0.a.bias", "0.b.bias"))
    changed = tuple(
        replace(p, dtype="float16") if p.names == ("{0..2}.b.weight",) else p for p in PLAN.parameters
    )
    assert adjacent_tensors(replace(PLAN, parameters=changed))[:2] == (
        ("0.a.bias", "0.b.bias"),
        ("1.a.bias", "1.b.bias"),
    )


def test_stored_tensors_of_packed_parameters_are_adjacent_where_rows_come_first() -> None:
    rows, columns = PackedDim(0, 1), PackedDim(1, 8)
    values, scale = PackedTensor("*", "int8", (rows, columns)), PackedTensor("*_scale", "float32", (rows,))
    turned, total = PackedTensor("*_turned", "int8", (columns, rows)), PackedTensor("*_total", "int8", ())
    packing = Packing("some", (values, scale, turned, total))
    changed = [replace(p, packing=packing) if len(p.dims) == 2 else p for p in PLAN.parameters]
    plan = replace(PLAN, parameters=tuple(changed))
    assert adjacent_tensors(plan)[:3] == (
        ("0.a.weight", "0.b.weight"),
        ("0.a.weight_scale", "0.b.weight_scale"),
        ("0.a.bias", "0.b.bias"),
    )
    wider = replace(packing, tensors=(replace(values, dtype="int32"), scale))
    changed = [replace(p, packing=wider) if p.names == ("{0..2}.b.weight",) else p for p in changed]
    assert adjacent_tensors(replace(plan, parameters=tuple(changed)))[0] == (
        "0.a.weight_scale",
        "0.b.weight_scale",
    )
