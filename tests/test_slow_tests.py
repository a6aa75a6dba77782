"""The list of tests that the default run leaves out names tests that are there."""

from __future__ import annotations

import pytest
from conftest import slow_tests
from places import ROOT


@pytest.mark.parametrize("beginning", slow_tests())
def test_it_is_there(beginning: str) -> None:
    file, _, name = beginning.partition("[")[0].partition("::")
    assert f"def {name.rpartition('::')[2]}(" in (ROOT / file).read_text()


def test_none_is_listed_twice() -> None:
    assert len(set(slow_tests())) == len(slow_tests())
