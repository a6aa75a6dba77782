"""Combinations of things that are made when they are asked for first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardconv.inputs.input_forms import Once, combined


def test_combinations_are_those_of_a_product() -> None:
    each = [(1, 2), (), (3,)], [(1, 2), (3, 4, 5), (6, 7)], []
    for values in each:
        assert list(combined([Once(iter(v)) for v in values])) == list(itertools.product(*values))


def test_nothing_is_made_before_it_is_needed_and_all_once() -> None:
    made: list[str] = []

    def source(name: str) -> Iterator[str]:
        for k in range(3):
            made.append(f"{name}{k}")
            yield made[-1]

    found = combined([Once(source("a")), Once(source("b"))])
    assert next(found) == ("a0", "b0")
    assert made == ["a0", "b0"]
    assert len(list(found)) == 8
    assert sorted(made) == ["a0", "a1", "a2", "b0", "b1", "b2"]
