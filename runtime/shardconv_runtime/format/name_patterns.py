"""The patterns that stand for given names, see ``names``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import PlanError
from .names import FORBIDDEN, NUMBER, shown

_Numbers = tuple[int, ...]


_Key = tuple[tuple[int, int, str], ...]


def natural_key(name: str) -> _Key:
    """Sorts names by component, numbers by value: ``h.2`` before ``h.10``."""
    return tuple((0, int(c), "") if NUMBER.fullmatch(c) else (1, 0, c) for c in name.split("."))


def compress(names: Iterable[str]) -> tuple[str, ...]:
    """The patterns that stand for exactly these names, in natural order of their first names.

    Names that differ only in numbers share a pattern where they are a full product of numbers;
    otherwise they are divided by the outermost number.

    Raises:
        PlanError: a name has an empty component, a brace, a slash or a control character.
    """
    groups: dict[tuple[str | None, ...], set[_Numbers]] = {}
    for name in names:
        _check_name(name)
        components = name.split(".")
        skeleton = tuple(None if NUMBER.fullmatch(c) else c for c in components)
        groups.setdefault(skeleton, set()).add(tuple(int(c) for c in components if NUMBER.fullmatch(c)))
    patterns = [
        (natural_key(_fill(skeleton, [values[:1] for values in grid])), _fill(skeleton, grid))
        for skeleton, rows in groups.items()
        for grid in _products(frozenset(rows))
    ]
    return tuple(pattern for _, pattern in sorted(patterns))


def _check_name(name: str) -> None:
    if name and (FORBIDDEN.search(name) or "" in name.split(".")):
        raise PlanError(
            f"the name {shown(name)} has an empty component, a brace, a slash or a control character"
        )


def _products(rows: frozenset[_Numbers]) -> Iterator[list[_Numbers]]:
    """Divide equally long rows into full products, given as one list of values for each column."""
    if rows == {()}:
        yield []
        return
    tails: dict[int, set[_Numbers]] = {}
    for first, *rest in rows:
        tails.setdefault(first, set()).add(tuple(rest))
    alike: dict[frozenset[_Numbers], list[int]] = {}
    for first in sorted(tails):
        alike.setdefault(frozenset(tails[first]), []).append(first)
    for tail, firsts in alike.items():
        for grid in _products(tail):
            yield [tuple(firsts), *grid]


def _fill(skeleton: tuple[str | None, ...], grid: list[_Numbers]) -> str:
    values = iter(grid)
    return ".".join(_braces(next(values)) if text is None else text for text in skeleton)


def _braces(values: _Numbers) -> str:
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return "{" + ",".join(_run(run) for run in runs) + "}"


def _run(run: list[int]) -> str:
    return f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
