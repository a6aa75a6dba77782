"""Elimination finds the optimum that trying everything finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardconv.planning import elimination
from shardconv.planning.elimination import Problem

Costs = list[tuple[tuple[int, ...], np.ndarray]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, Costs]:
    """Random tables over up to ten variables; all zeros is always feasible."""
    num = draw(st.integers(1, 10))
    costs: Costs = []
    for _ in range(draw(st.integers(1, 12))):
        scope = tuple(draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=min(4, num), unique=True)))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        table = rng.normal(size=(2,) * len(scope))
        table[rng.random(table.shape) < draw(st.sampled_from([0.0, 0.3, 0.7]))] = np.inf
        table[(0,) * len(scope)] = draw(st.floats(-1, 1))
        costs.append((scope, table))
    return num, costs


def cost(costs: Costs, values: tuple[int, ...] | list[int]) -> float:
    """Sum of all tables."""
    return sum(float(table[tuple(values[v] for v in scope)]) for scope, table in costs)


def solved(num: int, costs: Costs) -> list[int]:
    """By elimination."""
    problem = Problem(num)
    for scope, table in costs:
        problem.add(scope, table)
    return problem.solve()


@pytest.mark.parametrize("width", [16, 3, 2, 1])
@settings(max_examples=80, deadline=None)
@given(problems())
def test_equals_trying_everything(width: int, problem: tuple[int, Costs]) -> None:
    """A small ``MAX_WIDTH`` makes it condition on hubs."""
    num, costs = problem
    before, elimination.MAX_WIDTH = elimination.MAX_WIDTH, width
    try:
        found = solved(num, costs)
    finally:
        elimination.MAX_WIDTH = before
    best = min(cost(costs, values) for values in itertools.product((0, 1), repeat=num))
    assert np.isfinite(best)
    assert cost(costs, found) == pytest.approx(best, abs=1e-9)


def test_the_order_of_variables_does_not_matter() -> None:
    table = np.array([[0.0, 5.0], [-3.0, np.inf]])
    for scope, given_table in (((2, 0), table), ((0, 2), table.T)):
        assert solved(3, [(scope, given_table)]) == [0, 0, 1]


def test_what_nothing_decides_is_zero() -> None:
    problem = Problem(4)
    problem.add_unary(1, -1.0)
    problem.add_unary(2, 0.0)
    assert problem.solve() == [0, 1, 0, 0]


def test_never_both() -> None:
    problem = Problem(2)
    problem.add_unary(0, -1.0)
    problem.add_unary(1, -2.0)
    problem.forbid_both(0, 1)
    assert problem.solve() == [0, 1]


def test_solving_twice_gives_the_same() -> None:
    problem = Problem(3)
    problem.forbid_both(0, 1)
    problem.forbid_both(2, 1)
    for v in range(3):
        problem.add_unary(v, -1.0)
    assert problem.solve() == problem.solve() == [1, 0, 1]


def test_a_hub_is_conditioned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A star of 40 around one variable, and cliques that are wider than the limit."""
    monkeypatch.setattr(elimination, "MAX_WIDTH", 4)
    problem = Problem(48)
    for v in range(1, 41):
        problem.add((0, v), np.array([[0.0, 1.0], [0.5, -1.0]]))
    for a, b in itertools.combinations(range(41, 48), 2):
        problem.forbid_both(a, b)
        problem.add_unary(a, -1.0 - a / 100)
    found = problem.solve()
    assert found[:41] == [1] * 41
    assert sum(found[41:]) == 1
