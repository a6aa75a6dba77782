"""The steps around a module that holds some of the experts, and the checks of a plan that has them."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from boundaries import boundary
from hypothesis import given, settings
from hypothesis import strategies as st
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.plan import (
    AttributeOverride,
    CodeInfo,
    ModelInfo,
    ModulePlan,
    ParameterPlan,
    Plan,
)
from shardconv_runtime.format.slices import Mesh, local_size, ranges
from shardconv_runtime.parallel.attribute_overrides import apply_overrides, raise_flags
from shardconv_runtime.parallel.boundary import attach, forward_signature
from shardconv_runtime.parallel.row_ids import RowIds
from torch import Tensor, nn

from shardconv.simulation.rank_threads import run_ranks

HIDDEN = 6


class Experts(nn.Module):
    """A loop that leaves ids past the end out if it is told to, and fails on them if not."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.count = num_experts
        self.lenient = False
        self.matrix = nn.Parameter(torch.empty(num_experts, HIDDEN, HIDDEN, dtype=torch.float64).normal_())

    def forward(self, weights: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
            for one, share in zip(chosen, shares, strict=True):
                if not (self.lenient and one >= self.count):
                    out[token] += share * (x[token] @ self.matrix[one])
        return out


def entry(layout: Leaf, op: str, local: tuple[int, ...]) -> ModulePlan:
    """The plan of such a module."""
    return ModulePlan(
        ("",),
        "experts",
        inputs=(boundary("input.ids", op, layout=layout), boundary("input.weights", "zero_out_of_shard")),
        outputs=(boundary("output", "all_reduce", axes=layout.axes),),
        overrides=(AttributeOverride("count", layout.size, local),),
        flags=("lenient",) if op == "local_rows_or_end" else (),
    )


@pytest.mark.parametrize("op", ["local_rows", "local_rows_or_end"])
@settings(max_examples=25, deadline=None)
@given(
    num_experts=st.integers(4, 9),
    mesh=st.sampled_from([(2,), (3,), (4,), (2, 2)]),
    seed=st.integers(0, 1000),
    by_position=st.booleans(),
)
def test_the_ranks_terms_add_up(op: str, num_experts: int, mesh: Mesh, seed: int, by_position: bool) -> None:
    torch.manual_seed(seed)
    unsharded = Experts(num_experts)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    weights, ids = torch.rand(5, num_experts, dtype=torch.float64).topk(3)
    layout = Leaf(num_experts, tuple(range(len(mesh))))
    local = tuple(local_size(layout, mesh, rank) for rank in range(torch.Size(mesh).numel()))

    def rank(comm: Communicator) -> Tensor:
        part = copy.deepcopy(unsharded)
        ((start, stop),) = ranges(layout, comm.mesh, comm.rank)
        part.matrix = nn.Parameter(unsharded.matrix.detach()[start:stop])
        plan = entry(layout, op, local)
        apply_overrides(part, plan.overrides, comm.rank)
        raise_flags(part, plan.flags)
        attach(part, plan, comm, forward_signature(part))
        with torch.no_grad():
            got: Tensor = part(weights, x, ids) if by_position else part(ids=ids, weights=weights, x=x)
        return got

    with torch.no_grad():
        want = unsharded(weights, x, ids)
        for got in run_ranks(mesh, rank):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_out_of_shard_ids_are_one_past_the_end() -> None:
    def rank(comm: Communicator) -> tuple[list[int], list[bool]]:
        ids, out_of_shard = RowIds(comm, Leaf(5, (0,)), past_end=True)(torch.tensor([0, 4, 2, 5, 3]))
        return ids.tolist(), out_of_shard.tolist()

    first, second = run_ranks((2,), rank)
    assert first == ([0, 3, 2, 3, 3], [False, True, False, True, True])
    assert second == ([2, 1, 2, 2, 0], [True, False, True, True, False])


@pytest.mark.parametrize(
    ("flag", "message"),
    [("lenient", "it is True, and was False"), ("count", "it is 4"), ("nothing", "it is missing")],
)
def test_only_bools_that_are_false_are_set(flag: str, message: str) -> None:
    module = Experts(4)
    module.lenient = True
    with pytest.raises(ShardconvError, match=f"cannot set {flag}: {message}"):
        raise_flags(module, (flag,))


def plan(module: ModulePlan) -> Plan:
    """A plan of nothing but such a module."""
    return Plan(
        tp=2,
        mesh=(2,),
        model=ModelInfo("package.modeling:Model", "float32", 0),
        code=CodeInfo("", "", (), "0" * 64),
        parameters=(ParameterPlan(("matrix",), (Leaf(4, (0,)), Leaf(HIDDEN), Leaf(HIDDEN)), "float32"),),
        modules=(module,),
        experts="ep",
    )


GOOD = entry(Leaf(4, (0,)), "local_rows_or_end", (2,))


def test_a_plan_with_sharded_experts_on_disk() -> None:
    text = plan_json.dumps(plan(GOOD))
    assert plan_json.loads(text) == plan(GOOD)
    assert '"experts": "ep"' in text
    assert '"flags": ["lenient"]' in text
    assert '"experts": ' not in plan_json.dumps(dataclasses.replace(plan(GOOD), experts="tp"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"inputs": GOOD.inputs[::-1]},
            r"^inputs\[0\]: zero_out_of_shard needs a local_rows before",
        ),
        ({"inputs": GOOD.inputs[1:]}, r"zero_out_of_shard needs a local_rows before"),
        ({"outputs": (*GOOD.outputs, boundary("output", "zero_out_of_shard"))}, r"needs a local_rows among"),
        (
            {"outputs": (*GOOD.outputs, boundary("output", "local_rows_or_end", layout=Leaf(4, (0,))))},
            "input only",
        ),
        ({"flags": ("__class__",)}, "flags: not the name of an attribute: '__class__'"),
        ({"flags": ("a.b",)}, "flags: not the name of an attribute"),
        ({"flags": ("lenient", "lenient")}, "flags: an attribute is named twice"),
        (
            {"category": "boundary"},
            'flags: a module of the category "boundary" cannot have it',
        ),
        (
            {"category": "boundary", "flags": ()},
            'no module has the category "experts"',
        ),
    ],
)
def test_a_malformed_plan_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ShardconvError, match=message):
        plan_json.dumps(plan(dataclasses.replace(GOOD, **changes)))  # type: ignore[arg-type]


def test_there_are_two_ways_to_shard_experts() -> None:
    with pytest.raises(ShardconvError, match=r"^experts: expected one of tp, ep; got 'both'"):
        plan_json.dumps(dataclasses.replace(plan(GOOD), experts="both"))
