"""Combinations of things that are made when they are asked for first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


class Once(Iterable[_T]):
    """What an iterator yields, as often as it is asked for; each is made once, and none before its turn."""

    def __init__(self, source: Iterator[_T]) -> None:
        self._source = source
        self._made: list[_T] = []

    def __iter__(self) -> Iterator[_T]:
        for index in itertools.count():
            if index == len(self._made):
                self._made += itertools.islice(self._source, 1)
            if index == len(self._made):
                return
            yield self._made[index]


def combined(each: Sequence[Once[_T]]) -> Iterator[tuple[_T, ...]]:
    """One of each, in the order of ``itertools.product``, which would make all of them first."""
    if not each:
        yield ()
        return
    for first in each[0]:
        yield from ((first, *others) for others in combined(each[1:]))
