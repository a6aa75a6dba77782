"""Private interfaces of libraries are on one list, and exist in the installed versions."""

from __future__ import annotations

import re

import pytest
from private_interfaces import MODULES, NAMES, exists, used


def private(name: str) -> list[str]:
    return [word for word in re.split("[.:]", name) if word.startswith("_")]


LISTED = [*MODULES, *NAMES]


def test_the_list_is_complete() -> None:
    words = {word for name in LISTED for word in private(name)}
    missing = {name: files for name, files in used().items() if not words.issuperset(private(name))}
    assert not missing, "list them in tests/helpers/private_interfaces.py, or use something public"


def test_what_is_listed_is_used() -> None:
    assert {private(name)[-1] for name in LISTED} <= {word for name in used() for word in private(name)}


@pytest.mark.parametrize("name", LISTED)
def test_it_exists(name: str) -> None:
    pytest.importorskip(name.partition(".")[0])
    assert exists(name), f"{name}: {({**MODULES, **NAMES})[name]}"
