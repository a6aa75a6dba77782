"""Rules are sound: what they leave free gives the same numbers on parts (see ``rule_oracle``)."""

from __future__ import annotations

import math
import os
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_cases import GENERATORS, Draw
from rule_cases import CASES, Case, f, ints
from rule_oracle import MODES, Program, Wrong, body_dims, check
from torch import Tensor

from shardconv.dim_analysis import factory_rules, pointwise_rules, view_rules
from shardconv.dim_analysis.analysis import Analysis
from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.rules import RULES
from shardconv.planning.solve import solve
from shardconv.tracing.tape import Op
from shardconv.tracing.trace import trace

RANKS = {"parameter": 2, "summed": 3}
"""On how many ranks a case is run by default: parameters in halves, sums in thirds, which may be uneven."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_on_parts(case: Case, mode: str) -> None:
    require_numbers(case, mode, RANKS[mode])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_on_other_parts(case: Case, mode: str) -> None:
    require_numbers(case, mode, 5 - RANKS[mode])


def require_numbers(case: Case, mode: str, ranks: int) -> None:
    analysis = check(case.function, *case.operands, mode=mode, extents=(ranks,))
    assert not analysis.unknown
    if case.dims is not None:
        assert body_dims(analysis)[0] == case.dims


def test_every_rule_has_a_case() -> None:
    seen: set[Any] = set()
    for case in CASES:
        model = Program(case.function, case.operands, "parameter").to("meta")
        inputs = {f"i{i}": x for i, x in enumerate(case.operands) if not x.is_floating_point()}
        tape = trace(model, {"one": torch.ones(1, dtype=torch.float64), **inputs}, RULES)
        for op in tape.events:
            if isinstance(op, Op):
                base = op.base
                seen.add(RULES.get(base) or RULES.get(base.rstrip("_")))
    elsewhere = {
        factory_rules.needs_all,
        pointwise_rules.alias_write,
        RULES["aten._grouped_mm"],
        RULES["shardconv.experts"],
    }
    missing = {rule.__name__ for rule in set(RULES.values()) - seen - elsewhere}
    assert not missing


# Random shapes ---------------------------------------------------------------------------------------

EXAMPLES = int(os.environ.get("SHARDCONV_EXAMPLES", "5"))
"""Random calls of each family of operators; many more for a long search."""
ANY = settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES < 50)


@ANY
@pytest.mark.parametrize("family", GENERATORS)
@given(data=st.data())
def test_random_shapes(family: str, data: st.DataObject) -> None:
    """Each operator on parts of operands of any shape gives the parts of the full result."""
    draw = Draw(lambda low, high: data.draw(st.integers(low, high)))
    function, operands = GENERATORS[family](draw)
    check(function, *operands, mode=data.draw(st.sampled_from(MODES)))


def _operators(function: Any, operands: tuple[Tensor, ...]) -> set[str]:
    """Names, without overload, of what a function runs."""
    model = Program(function, operands, "parameter").to("meta")
    inputs = {f"i{i}": x for i, x in enumerate(operands) if not x.is_floating_point()}
    tape = trace(model, {"one": torch.ones(1, dtype=torch.float64), **inputs}, RULES)
    return {e.base for e in tape.events if isinstance(e, Op)}


NOT_DRAWN = {
    "alias_write": "is no operator: memory that was written through another tensor",
    "shardconv.experts": "is a module",
    "opaque": "is a module",
    "question": "is no operator: a value that code asked for",
    "aten._grouped_mm": "has no kernel for float64",
    "transformers.grouped_mm_fallback": "has no kernel for float64",
}
"""What no random case can run; each has tests of its own."""


def test_every_rule_is_drawn() -> None:
    """For each name of the table a random case reaches its rule, by that name or by another of the rule's."""
    seen: set[str] = set()
    for family, generator in GENERATORS.items():
        for seed in range(40):
            seen |= _operators(*generator(Draw(Random(f"{family} {seed}").randint)))
    drawn = {RULES.get(name) or RULES.get(name.rstrip("_")) for name in seen}
    missing = {name for name, rule in RULES.items() if rule not in drawn}
    assert missing <= set(NOT_DRAWN)


# The oracle itself -----------------------------------------------------------------------------------


def _without_rule(monkeypatch: pytest.MonkeyPatch, name: str, rule: Any) -> None:
    monkeypatch.setitem(RULES, name, rule)


@pytest.mark.parametrize(
    ("name", "rule", "function", "operand"),
    [
        ("aten.flip", RULES["aten.neg"], lambda x: x.flip(-1), f(4, 6)),
        ("aten.softmax", RULES["aten.neg"], lambda x: x.softmax(-1), f(4, 6)),
        ("aten.silu", RULES["aten.neg"], lambda x: F.silu(x), f(4, 6)),
        ("aten.cumsum", RULES["aten.neg"], lambda x: x.cumsum(0), f(4, 6)),
        ("aten.transpose", RULES["aten.neg"], lambda x: x.transpose(0, 1), f(6, 6)),
    ],
)
def test_the_oracle_finds_a_wrong_rule(
    monkeypatch: pytest.MonkeyPatch, name: str, rule: Any, function: Any, operand: Tensor
) -> None:
    monkeypatch.setitem(RULES, name, rule)
    with pytest.raises(Wrong):
        check(function, operand, mode="summed")


@pytest.mark.parametrize(
    ("family", "name", "rule"),
    [
        ("summed", "aten.cumsum", pointwise_rules.linear),
        ("summed", "aten.tril", pointwise_rules.linear),
        ("summed", "aten.mean", RULES["aten.sum"]),
        ("shifted", "aten.roll", pointwise_rules.linear),
        ("shifted", "aten.flip", pointwise_rules.linear),
        ("binary", "aten.div", pointwise_rules.multiplicative),
        ("binary", "aten.maximum", pointwise_rules.additive),
        ("masked", "aten.masked_fill", pointwise_rules.linear),
        ("unary", "aten.gelu", pointwise_rules.linear),
        ("along", "aten.sort", pointwise_rules.nonlinear),
        ("along", "aten.cumprod", pointwise_rules.nonlinear),
        ("normalized", "aten.layer_norm", pointwise_rules.nonlinear),
        ("reduced", "aten.prod", RULES["aten.sum"]),
        ("reduced", "aten.amax", RULES["aten.sum"]),
        ("moved", "aten.permute", RULES["aten.view"]),
    ],
)
def test_random_shapes_find_a_wrong_rule(
    monkeypatch: pytest.MonkeyPatch, family: str, name: str, rule: Any
) -> None:
    """One that is right for some shapes and arguments, or for tensors that are not partial."""
    monkeypatch.setitem(RULES, name, rule)
    with pytest.raises(Wrong):
        _check_many(family, 150)


def _check_many(family: str, count: int) -> None:
    for seed in range(count):
        function, operands = GENERATORS[family](Draw(Random(f"{family} {seed}").randint))
        check(function, *operands, mode=MODES[seed % 2])


# Operators that no case above can run -----------------------------------------------------------------


def _analysis(function: Any, *operands: Tensor) -> Analysis:
    """Without numbers."""
    model = Program(function, operands, "summed").to("meta")
    inputs = {f"i{i}": x for i, x in enumerate(operands) if not x.is_floating_point()}
    return analyze(trace(model, {"one": torch.ones(1, dtype=torch.float64), **inputs}, RULES))


def test_an_unknown_operator_blocks_all_that_it_touches() -> None:
    analysis = _analysis(lambda x, y: torch.cdist(x, y) @ y, f(4, 6), f(4, 6))
    (name,) = analysis.unknown
    assert name.startswith("aten._cdist_forward")
    assert analysis.unknown[name] == "body"
    source = next(e for e in analysis.tape.events if isinstance(e, Op) and e.name == name)
    for tid in (*source.inputs, *source.outputs):
        assert all(dim.blocked for dim in analysis.dims[tid])
        assert analysis.partial[tid].zero


def test_an_index_that_is_a_list_needs_all_of_the_dim() -> None:
    analysis = _analysis(lambda x: x[:, [0, 2, 1]], f(4, 6))
    assert body_dims(analysis) == ["4 3!"]
    source = next(e for e in analysis.tape.events if isinstance(e, Op) and e.base == "aten.index")
    assert [dim.blocked for dim in analysis.dims[source.inputs[0]]] == [False, True]


def test_groups_of_a_grouped_product_stay_replicated() -> None:
    def function(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x.bfloat16(), w.bfloat16(), offs=ends.int())

    analysis = _analysis(function, f(16, 8), f(2, 8, 16), ints(8, 16))
    assert body_dims(analysis) == ["16! (2*8!)"]
    op = next(e for e in analysis.tape.events if isinstance(e, Op) and "grouped_mm" in e.name)
    assert " ".join(map(repr, analysis.dims[op.inputs[1]])) == "2! 8! (2*8!)"
    assert not analysis.partial[op.outputs[0]].zero


def test_what_counts_needs_all() -> None:
    analysis = _analysis(lambda x: torch.histc(x, bins=4, min=0, max=3), f(12))
    assert body_dims(analysis) == ["4!"]
    op = next(e for e in analysis.tape.events if isinstance(e, Op) and "histc" in e.name)
    assert analysis.dims[op.inputs[0]][0].blocked


def test_a_factor_that_squares_is_never_partial() -> None:
    """The solver, too, must not take the product of a partial with itself for one factor."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return x * y + (x + y)

    analysis = _analysis(function, f(40, 60), f(40, 60))
    product = next(e for e in analysis.tape.events if isinstance(e, Op) and e.call > 0 and "mul" in e.name)
    assignment = solve(analysis, 2)
    assert not any(assignment.partial_axes(analysis.partial[t]) for t in product.inputs)


# Random programs -------------------------------------------------------------------------------------


def _regrouped(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements: two dims merged, or one split."""
    i = draw(st.integers(0, len(shape) - 1))
    if i + 1 < len(shape) and draw(st.booleans()):
        return (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
    divisors = [d for d in range(1, shape[i] + 1) if shape[i] % d == 0]
    inner = draw(st.sampled_from(divisors))
    return (*shape[:i], shape[i] // inner, inner, *shape[i + 1 :])


def _step(draw: Any, x: Tensor) -> Tensor:
    """One random operator that keeps tensors small."""
    dim = draw(st.integers(0, x.dim() - 1))
    size = x.shape[dim]
    kind = draw(
        st.sampled_from(["view", "view", "swap", "cut", "cat", "halves", "step", "sum", "self", "repeat"])
    )
    if kind == "view":
        return x.reshape(_regrouped(draw, tuple(map(int, x.shape))))
    if kind == "swap":
        return x.transpose(dim, draw(st.integers(0, x.dim() - 1)))
    if kind == "cut":
        start = draw(st.integers(0, int(size) - 1))
        return x.narrow(dim, start, draw(st.integers(1, int(size) - start)))
    if kind == "cat" and x.numel() < 300:
        return torch.cat([x, x * 2], dim)
    if kind == "halves" and size % 2 == 0:
        a, b = x.chunk(2, dim)
        return torch.cat([-b, a], dim) if draw(st.booleans()) else a * b
    if kind == "step":
        step = draw(st.integers(2, 3))
        return x[(slice(None),) * dim + (slice(draw(st.integers(0, 1)), None, step),)] if size > 3 else x
    if kind == "sum" and x.dim() > 1:
        return x.sum(dim, keepdim=draw(st.booleans()))
    if kind == "repeat" and x.numel() < 300:
        return x.repeat_interleave(2, dim) if draw(st.booleans()) else torch.cat([x] * 2, dim)
    return F.silu(x) + x


@settings(max_examples=max(40, 8 * EXAMPLES), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_programs(data: st.DataObject) -> None:
    """Chains of operators over shared operands, joined where shapes agree."""

    def function(*operands: Tensor) -> Tensor:
        made = list(operands)
        for _ in range(data.draw(st.integers(1, 6))):
            x = data.draw(st.sampled_from(range(len(made))))
            y = _step(data.draw, made[x])
            made.append(y)
            alike = [z for z in made[:-1] if z.shape == y.shape]
            if alike and data.draw(st.booleans()):
                made.append(y + alike[-1] if data.draw(st.booleans()) else y * alike[-1])
        return made[-1]

    shapes = st.sampled_from([(4, 6), (12,), (2, 12), (8, 3), (24,), (5, 4)])
    operands = [f(*data.draw(shapes)) for _ in range(data.draw(st.integers(1, 2)))]
    check(function, *operands, mode=data.draw(st.sampled_from(MODES)), extents=(2,))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
def test_regroup_keeps_sizes(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    divisors = [d for d in range(1, numel + 1) if numel % d == 0]
    outer = data.draw(st.sampled_from(divisors))
    analysis = _analysis(lambda x: x.reshape(outer, numel // outer), f(*shape))
    assert len(body_dims(analysis)) == 1
    assert RULES["aten.view"] is view_rules.view
