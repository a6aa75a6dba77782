"""The list of tests that the default run leaves out names tests that are there."""

from __future__ import annotations

from functools import cache

from conftest import slow_tests
from places import ROOT


@cache
def text(file: str) -> str:
    return (ROOT / file).read_text()


def test_they_are_there() -> None:
    for beginning in slow_tests():  # not a test each: there are hundreds
        file, _, name = beginning.partition("[")[0].partition("::")
        assert f"def {name.rpartition('::')[2]}(" in text(file), beginning


def test_none_is_listed_twice() -> None:
    assert len(set(slow_tests())) == len(slow_tests())
