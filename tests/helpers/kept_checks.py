"""The numerical checks of plans that are solved meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from shardconv import passes
from shardconv.numeric_check import NumericCheck


@contextmanager
def keeping_checks() -> Iterator[list[NumericCheck]]:
    """A context that keeps each check that proves a plan."""
    checks: list[NumericCheck] = []

    def made(*given: object) -> NumericCheck:
        checks.append(NumericCheck(*given))  # type: ignore[arg-type]
        return checks[-1]

    with mock.patch.object(passes, "NumericCheck", made):
        yield checks
