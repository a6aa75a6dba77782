"""The solver's choices on small models whose best plan is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardconv.dim_analysis import dim_trees
from shardconv.dim_analysis.analysis import Analysis, corresponding_leaves, multiplying_pairs
from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.dim_trees import leaf
from shardconv.dim_analysis.rules import RULES
from shardconv.planning.layout import Layouts
from shardconv.planning.solve import prime_factors, solve
from shardconv.tracing.trace import trace

WIDTH = 64


class Mlp(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Heads(nn.Module):
    """Grouped attention; ``num_kv`` key/value heads."""

    def __init__(self, num: int, num_kv: int) -> None:
        super().__init__()
        self.num, self.num_kv = num, num_kv
        self.q = nn.Linear(WIDTH, num * 8, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * num_kv * 8, bias=False)
        self.out = nn.Linear(num * 8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.num, 8).transpose(1, 2)
        k, v = (t.view(b, s, self.num_kv, 8).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(b, s, -1))


def analyzed(*layers: nn.Module) -> Analysis:
    """The layers one after the other."""
    model = nn.Sequential(*layers).to("meta")
    return analyze(trace(model, {"input": torch.zeros(3, 26, WIDTH)}, RULES))


def layouts(analysis: Analysis, tp: int, forbidden: list[dim_trees.Node] | None = None) -> dict[str, str]:
    """Layout of each parameter, as the plan writes it."""
    from shardconv_runtime.format.dims import to_text

    found = Layouts(analysis, solve(analysis, tp, forbidden or ()))
    tensors = analysis.tape.tensors
    named = {info.name: tid for tid, info in enumerate(tensors) if info.kind == "parameter"}
    return {name: ", ".join(map(to_text, found.dims(tid))) for name, tid in named.items()}


@given(st.integers(1, 5000))
def test_prime_factors(n: int) -> None:
    factors = prime_factors(n)
    assert list(factors) == sorted(factors)
    product = 1
    for p in factors:
        assert all(p % d for d in range(2, int(p**0.5) + 1))
        product *= p
    assert product == n


def test_column_then_row() -> None:
    assert layouts(analyzed(Mlp(256)), 2) == {"0.up.weight": "256@0, 64", "0.down.weight": "64, 256@0"}


@pytest.mark.parametrize("tp", [2, 3, 4, 6, 8])
def test_adjacent_axes_that_are_used_together_are_one(tp: int) -> None:
    analysis = analyzed(Mlp(264))
    assert solve(analysis, tp).mesh == (tp,)
    assert layouts(analysis, tp)["0.up.weight"] == "264@0, 64"


def test_one_rank() -> None:
    analysis = analyzed(Mlp(256))
    assignment = solve(analysis, 1)
    assert (assignment.mesh, assignment.leaves, assignment.partials) == ((), {}, {})
    assert layouts(analysis, 1)["0.up.weight"] == "256, 64"


def test_a_forbidden_leaf_stays_replicated() -> None:
    analysis = analyzed(Mlp(256), Mlp(256))
    tid = next(t for t, i in enumerate(analysis.tape.tensors) if i.name == "0.up.weight")
    found = layouts(analysis, 2, [analysis.dims[tid][0]])
    assert "@" not in found["0.up.weight"].split(",")[0]
    assert found["1.up.weight"] == "256@0, 64"


def test_key_value_heads_take_the_first_axes_and_the_group_the_rest() -> None:
    analysis = analyzed(Heads(8, 2))
    assert solve(analysis, 8).mesh == (2, 4)
    assert layouts(analysis, 8) == {
        "0.q.weight": "2@0*4@1*8, 64",
        "0.kv.weight": "2@0*8 + 2@0*8, 64",
        "0.out.weight": "64, 2@0*4@1*8",
    }


def test_more_ranks_than_positions() -> None:
    """A dim of 3 is never given to 4 ranks."""
    found = layouts(analyzed(Mlp(3)), 4)
    assert all(not part.strip().startswith("3@") or "3@0.1" not in part for part in found.values())


def test_inputs_and_outputs_are_replicated() -> None:
    analysis = analyzed(Mlp(256), Heads(8, 8), Mlp(128))
    assignment = solve(analysis, 4)
    for tid in (*analysis.tape.inputs, *analysis.tape.outputs):
        assert not any(assignment.axes(x) for d in analysis.dims[tid] for x in dim_trees.leaves(d))
        assert not assignment.partial_axes(analysis.partial[tid])


def test_no_tensor_is_sharded_twice_on_an_axis() -> None:
    analysis = analyzed(Mlp(256), Heads(8, 2), Mlp(128))
    assignment = solve(analysis, 8)
    for tid, dims in analysis.dims.items():
        partial = set(assignment.partial_axes(analysis.partial[tid]))
        for x, y in multiplying_pairs(dims):
            assert not set(assignment.axes(x)) & set(assignment.axes(y))
        for d in dims:
            for x in dim_trees.leaves(d):
                assert not partial & set(assignment.axes(x))


def test_corresponding_leaves() -> None:
    a, b = leaf(12), leaf(12)
    assert corresponding_leaves(a, b) == [(a, b)]
    dim_trees.split(a, 3)
    assert corresponding_leaves(a, b) is None
    outer, inner = dim_trees.split(b, 3)
    assert [(y.size) for _, y in corresponding_leaves(a, b) or ()] == [outer.size, inner.size]
    dim_trees.cut(dim_trees.leaves(a)[0], (1, 3))
    assert corresponding_leaves(a, b) is None
    assert corresponding_leaves(leaf(1), leaf(1)) == []


def test_multiplying_pairs() -> None:
    a, b, c = leaf(2), leaf(3), leaf(5)
    assert list(multiplying_pairs([dim_trees.product([a, b]), c])) == [(a, b), (a, c), (b, c)]
    assert list(multiplying_pairs([dim_trees.concatenation([a, b])])) == []
    assert list(multiplying_pairs([a, a])) == [(a, a)]
