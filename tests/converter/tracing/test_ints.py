"""Traced ints behave as ints and remember where they came from."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardconv.tracing.functions import Expr, TracedInt, evaluate, sources, traced_ints

NUMBERS = st.integers(-50, 50)
OPERATIONS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]


def attribute(name: str, value: int) -> TracedInt:
    """As the tracer makes them."""
    return TracedInt(value, ("attr", "block", name, value))


def under(**values: int) -> Any:
    """A lookup of changed attributes; the others keep their values."""

    def lookup(source: Expr) -> int:
        return values.get(source[2], source[3])

    return lookup


@given(NUMBERS, NUMBERS, st.sampled_from(OPERATIONS), st.sampled_from(["both", "left", "right"]))
def test_arithmetic_is_that_of_ints(a: int, b: int, operation: Any, traced: str) -> None:
    x = attribute("a", a) if traced != "right" else a
    y = attribute("b", b) if traced != "left" else b
    try:
        want = operation(a, b)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            operation(x, y)
        return
    got = operation(x, y)
    assert got == want
    assert type(got) is TracedInt
    assert evaluate(got, under()) == want


@given(NUMBERS, NUMBERS)
def test_everything_else_is_that_of_ints(a: int, b: int) -> None:
    x = attribute("a", a)
    assert (x == b, x < b, x >= b, hash(x), bool(x)) == (a == b, a < b, a >= b, hash(a), bool(a))
    assert (x / 2, x**2, -x, abs(x), str(x), f"{x:4d}") == (a / 2, a**2, -a, abs(a), str(a), f"{a:4d}")
    assert isinstance(x / 2, float)
    assert (x + 0.5, 0.5 * x) == (a + 0.5, 0.5 * a)
    assert list(range(5))[x % 5] == a % 5
    assert evaluate(-x, under(a=b)) == -b


Made = tuple[Any, Any]


def _expressions() -> st.SearchStrategy[Any]:
    """(what to compute from a, b and c) as nested tuples."""
    leaf = st.one_of(st.sampled_from(["a", "b", "c"]), st.integers(1, 9))
    return st.recursive(
        leaf, lambda inner: st.tuples(st.sampled_from(OPERATIONS), inner, inner), max_leaves=8
    )


def _compute(tree: Any, values: dict[str, Any]) -> Any:
    if isinstance(tree, tuple):
        return tree[0](_compute(tree[1], values), _compute(tree[2], values))
    return values[tree] if isinstance(tree, str) else tree


@given(_expressions(), st.tuples(*[st.integers(1, 40)] * 3), st.tuples(*[st.integers(1, 40)] * 3))
def test_an_expression_is_computed_again_under_other_values(
    tree: Any, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    names = ("a", "b", "c")
    try:
        traced = _compute(tree, {n: attribute(n, v) for n, v in zip(names, before, strict=True)})
        want = _compute(tree, dict(zip(names, after, strict=True)))
    except ZeroDivisionError:
        return
    assert evaluate(traced, under(**dict(zip(names, after, strict=True)))) == want
    if type(traced) is TracedInt:
        assert {s[2] for s in sources(traced.expr)} <= set(names)


def test_provenance_survives_where_ints_travel() -> None:
    heads, width = attribute("heads", 8), TracedInt(6, ("size", 3, 1))
    shape = torch.Size([heads, width])
    assert [n.expr for n in traced_ints(tuple(shape))] == [heads.expr, width.expr]
    first, *rest = shape
    assert (type(first), type(rest[0])) == (TracedInt, TracedInt)
    assert [n.expr for n in traced_ints(slice(None, heads, width))] == [heads.expr, width.expr]
    assert [n.expr for n in traced_ints({"a": [heads, (width, 3)], "b": True})] == [heads.expr, width.expr]
    assert copy.deepcopy([heads])[0].expr == heads.expr
    assert (
        copy.copy(heads).expr == heads.expr if type(copy.copy(heads)) is TracedInt else copy.copy(heads) == 8
    )


def test_a_pickled_one_is_a_plain_int() -> None:
    assert type(pickle.loads(pickle.dumps(attribute("a", 3)))) is int


def test_containers_are_rebuilt() -> None:
    heads = attribute("heads", 8)
    value = (heads * 2, [heads, "x"], {"k": slice(heads, None, 2)}, 2.5, None)
    assert evaluate(value, under(heads=3)) == (6, [3, "x"], {"k": slice(3, None, 2)}, 2.5, None)
    assert evaluate(True, under()) is True


def test_a_bool_is_no_traced_int() -> None:
    assert list(traced_ints((True, 3, "a"))) == []
