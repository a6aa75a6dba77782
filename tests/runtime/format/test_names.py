"""Patterns of names: compact, exact, deterministic, bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.names import compress, expand, expand_all, natural_key

components = st.one_of(
    st.integers(0, 12).map(str),
    st.sampled_from(["h", "layers", "w1", "01", "a-b", "007", "é", "²", "x"]),
)
names = st.one_of(st.just(""), st.lists(components, min_size=1, max_size=4).map(".".join))


@settings(deadline=None)
@given(st.sets(names, max_size=60))
def test_round_trip(chosen: set[str]) -> None:
    expanded = expand_all(compress(chosen))
    assert len(expanded) == len(chosen)
    assert set(expanded) == chosen


@settings(deadline=None)
@given(st.sets(names, max_size=30), st.randoms(use_true_random=False))
def test_order_of_the_input_does_not_matter(chosen: set[str], rng: random.Random) -> None:
    shuffled = [*chosen, *chosen]
    rng.shuffle(shuffled)
    patterns = compress(shuffled)
    assert patterns == compress(sorted(chosen))
    firsts = [natural_key(expand(pattern)[0]) for pattern in patterns]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("", [""]),
        ("lm_head", ["lm_head"]),
        ("h.{0,1}.w", ["h.0.w", "h.1.w"]),
        ("h.{0,2..4}", ["h.0", "h.2", "h.3", "h.4"]),
        ("{0,1}.e.{9..11}", ["0.e.9", "0.e.10", "0.e.11", "1.e.9", "1.e.10", "1.e.11"]),
    ],
)
def test_both_ways(pattern: str, expanded: list[str]) -> None:
    assert expand(pattern) == expanded
    assert compress(expanded) == (pattern,)


def test_layers_and_experts_are_one_product() -> None:
    chosen = [f"layers.{i}.experts.{e}.up" for i in range(3, 61) for e in range(256)]
    assert compress(chosen) == ("layers.{3..60}.experts.{0..255}.up",)


def test_names_that_are_not_a_product_are_divided_by_the_outermost_number() -> None:
    chosen = {f"l.{i}.e.{e}" for i in range(6) for e in range(4)} - {"l.2.e.3", "l.4.e.3"}
    assert compress(chosen) == ("l.{0,1,3,5}.e.{0..3}", "l.{2,4}.e.{0..2}")


def test_natural_order_and_kinds_of_names() -> None:
    chosen = ["h.10.b", "h.2.b", "h.2.a", "h.1x.b", "h", "a", "h.02.b", ""]
    assert compress(chosen) == ("", "a", "h", "h.2.a", "h.{2,10}.b", "h.02.b", "h.1x.b")


@pytest.mark.parametrize(
    "pattern",
    [
        *[".", "a.", ".a", "a..b", "a/b", "a\\b", "../a", "a\0", "a\n", "a\x1bb"],
        *["{}", "{", "}", "a}", "{a}", "{0", "{0}x", "x{0}", "{0}{1}", "{0..}", "{..1}", "{0.1}", "{-1}"],
        *[
            "{01}",
            "{0,}",
            "{1,0}",
            "{0,0}",
            "{2..1}",
            "{1..1}",
            "{0..3,2}",
            "{ 0}",
            "{0..9999999999}",
            "{{0}}",
        ],
    ],
)
def test_malformed_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(PlanError):
        expand(pattern)


def test_expansion_is_bounded() -> None:
    with pytest.raises(PlanError, match="more than 524288"):
        expand("{0..999999999}.{0..999999999}")
    with pytest.raises(PlanError, match="expands to 3 names, more than 1"):
        expand_all(["a", "{0..2}"], limit=2)


@pytest.mark.parametrize("name", ["a{0}", "a..b", "a.", "a/b", "a\\b", "a\n"])
def test_names_that_no_pattern_can_hold_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match="empty component"):
        compress(["fine", name])
