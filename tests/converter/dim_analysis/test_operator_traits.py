"""Traits of operators are found by any of their names."""

from __future__ import annotations

import pytest

from shardconv.dim_analysis.operator_traits import NO_TRAITS
from shardconv.dim_analysis.rules import RULES, traits_of


@pytest.mark.parametrize("name", ["aten.mm", "aten.mm.default", "aten.baddbmm_.default", "aten.linear"])
def test_products(name: str) -> None:
    assert traits_of(name).is_product


def test_products_of_a_stack() -> None:
    assert [name for name in RULES if traits_of(name).is_grouped] == [
        "aten._grouped_mm",
        "transformers.grouped_mm_fallback",
    ]


@pytest.mark.parametrize("name", ["aten.relu.default", "aten.softmax.int", "nothing", "shardconv.experts"])
def test_others(name: str) -> None:
    assert traits_of(name) == NO_TRAITS
