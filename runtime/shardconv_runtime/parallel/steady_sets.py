"""Sets that are iterated in one order, whichever process or copy iterates them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class SteadySet(set[Any]):
    """A set that is iterated in the order of its elements' representations.

    The order of a set of strings depends on the process, and on how the set was made: that of a copy may be
    another one. A forward pass that loops over one would call its modules in another order on another rank.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=repr))
