"""The solver against all assignments: on tiny models every choice is written out and priced.

Random models of one or two layers, on one mesh axis and on a second one, whatever splitting is worth: the
price of the solver's choice is that of the best one (see ``brute_force``), to the last tie-breaker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from brute_force import Judge
from torch import Tensor, nn

from shardconv.dim_analysis.analysis import Analysis
from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.dim_trees import Node
from shardconv.dim_analysis.rules import RULES
from shardconv.planning.axis_variables import SolverInput
from shardconv.planning.mesh_axis_problem import AxisProblem, solve_axis
from shardconv.planning.solve import MAX_REPLICATED, SAVING_WEIGHTS, prime_factors, solve
from shardconv.tracing.fold import Folded
from shardconv.tracing.tape import Mark
from shardconv.tracing.trace import trace

NUM_MODELS = 40
SEEDS = [
    seed if seed < NUM_MODELS // 2 else pytest.param(seed, marks=pytest.mark.slow)
    for seed in range(NUM_MODELS)
]
BATCH, LENGTH, WIDTH = 3, 11, 6


# Tiny models -----------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two matrices; in the middle an activation, a norm, or nothing."""

    def __init__(self, width: int, inner: int, middle: str, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias), nn.Linear(inner, width, bias)
        self.middle = nn.RMSNorm(inner) if middle == "norm" else None
        self.activation = F.silu if middle == "activation" else lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(self.middle(y) if self.middle else self.activation(y))


class Gated(nn.Module):
    """Gate and up in one weight, of the module itself."""

    def __init__(self, width: int, inner: int, interleaved: bool) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.empty(2 * inner, width))
        self.down = nn.Parameter(torch.empty(inner, width))
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        wide = x @ self.both.t()
        gate, up = (wide[..., ::2], wide[..., 1::2]) if self.interleaved else wide.chunk(2, -1)
        return (F.silu(gate) * up) @ self.down


class Heads(nn.Module):
    """Grouped attention over one projection."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.cuts = [heads * 2, groups * 2, groups * 2]
        self.all = nn.Parameter(torch.empty(sum(self.cuts), width))
        self.out = nn.Linear(heads * 2, width, False)

    def forward(self, x: Tensor) -> Tensor:
        parts = F.linear(x, self.all).split(self.cuts, -1)
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Squared(nn.Module):
    """Nothing partial passes through."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Chain(nn.Module):
    """Layers one after another, some around a residual; perhaps a table before and a head behind them."""

    def __init__(self, layers: Sequence[nn.Module], residual: Sequence[bool], words: int, head: str) -> None:
        super().__init__()
        self.layers, self.residual = nn.ModuleList(layers), residual
        self.table = nn.Embedding(words, WIDTH) if words else None
        self.head = nn.Linear(WIDTH, words, head == "biased") if head else None
        if self.table and self.head and head == "tied":
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x) if self.table else x
        for layer, residual in zip(self.layers, self.residual, strict=True):
            x = x + layer(x) if residual else layer(x)
        return self.head(x) if self.head else x


def layer(random: Random) -> nn.Module:
    """One layer of some kind."""
    inner = random.choice([2, 3, 8, 20])
    kind = random.choice(["mlp", "mlp", "gated", "heads", "linear", "norm", "squared"])
    if kind == "mlp":
        return Mlp(WIDTH, inner, random.choice(["", "norm", "activation"]), random.random() < 0.5)
    if kind == "gated":
        return Gated(WIDTH, inner, random.random() < 0.5)
    if kind == "heads":
        groups = random.choice([1, 2, 3])
        return Heads(WIDTH, groups * random.choice([1, 2, 4]), groups)
    if kind == "linear":
        return nn.Linear(WIDTH, WIDTH, bias=random.random() < 0.5)
    if kind == "norm":
        return nn.LayerNorm(WIDTH) if random.random() < 0.5 else nn.RMSNorm(WIDTH)
    return Squared()


def tiny(seed: int) -> Analysis:
    """A random model of a few layers."""
    random = Random(seed)
    layers = [layer(random) for _ in range(random.randint(1, 2))]
    words = random.choice([0, 0, 7, 16])
    head = random.choice(["", "plain", "biased", "tied"]) if words else ""
    model = Chain(layers, [random.random() < 0.6 for _ in layers], words, head)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    inputs = {"x": ids if words else torch.zeros(BATCH, LENGTH, WIDTH)}
    return analyze(trace(model.to("meta"), inputs, RULES))


# The tests -------------------------------------------------------------------------------------------


def solved_and_cheapest(seed: int, extent: int) -> Iterator[tuple[float, float]]:
    """Prices of the solver's choice and of the best one, on a first axis and on a second one after it.

    Nothing where there are too many assignments to write out.
    """
    analysis = tiny(seed)
    given = SolverInput(analysis, (), Folded(analysis.tape))
    taken: dict[Node, int] = {}
    for _ in range(2):
        judge = Judge(analysis, extent, taken)
        if judge.possible is None:
            return
        for worth in (0.3, SAVING_WEIGHTS[-1], 1.0):
            sharded, partial = solve_axis(given, extent, taken, worth)
            assert set(sharded) <= set(judge.keys)
            yield judge.price([*sharded, *partial], worth), judge.price(judge.best(worth), worth)
        taken = {key: taken.get(key, 1) * (extent if key in sharded else 1) for key in judge.keys}


@pytest.mark.parametrize("extent", [2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_assignment_is_cheaper(seed: int, extent: int) -> None:
    prices = list(solved_and_cheapest(seed, extent))
    if not prices:
        pytest.skip("too many assignments")
    for price, best in prices:
        assert price == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_most_models_are_small_enough_and_worth_sharding() -> None:
    found = [list(solved_and_cheapest(seed, 2)) for seed in range(NUM_MODELS)]
    assert sum(bool(prices) for prices in found) >= 0.8 * NUM_MODELS
    assert sum(min(best for _, best in prices) < 0 for prices in found if prices) >= 0.6 * NUM_MODELS


@pytest.mark.parametrize("tp", [2, 3, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_complete_solver(seed: int, tp: int) -> None:
    """What ``solve`` returns is the cheapest for what it takes a saved element to be worth."""
    analysis = tiny(seed)
    assignment = solve(analysis, tp)
    assert prime_factors(tp) == (tp,)
    chosen = {key for table in (assignment.leaves, assignment.partials) for key, at in table.items() if at}
    judge = Judge(analysis, tp, {})
    if judge.possible is None:
        pytest.skip("too many assignments")
    first = judge.best(SAVING_WEIGHTS[0])
    weights = SAVING_WEIGHTS if judge.replicated(first) > MAX_REPLICATED else SAVING_WEIGHTS[:1]
    assert any(
        judge.price(chosen, worth) == pytest.approx(judge.price(judge.best(worth), worth), rel=1e-9, abs=1e-9)
        for worth in weights
    )
    assert judge.replicated(chosen) <= judge.replicated(first) + 1e-12


# The comparison itself -------------------------------------------------------------------------------


def _without_gathers(problem: AxisProblem, before: Node, after: Node, gather: float) -> None:
    return None


def _cheap_reductions(problem: AxisProblem, mark: Mark) -> None:
    problem.latency, kept = problem.latency / 100, problem.latency
    AXIS_MARK(problem, mark)
    problem.latency = kept


AXIS_MARK = AxisProblem._mark


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_mark_dim", _without_gathers),
        ("_mark", _cheap_reductions),
        ("_exclusions", lambda *_: None),
        ("_contraction", lambda *_: None),
        ("_must_be_replicated", lambda *_: None),
    ],
)
def test_a_wrong_solver_is_found(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    monkeypatch.setattr(AxisProblem, name, wrong)
    prices = [pair for seed in range(12) for pair in solved_and_cheapest(seed, 2)]
    assert any(price > best + 1e-6 * abs(best) + 1e-9 for price, best in prices)
