"""Many names of modules or parameters written as few patterns.

``model.layers.{0..31}.mlp.up_proj`` expands to 32 names, ``h.{0,2..5}.attn`` to five. Several
braces are a Cartesian product, the first one slowest. A brace is a full component between
dots. The empty pattern is the empty name, which is the model itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product
from typing import TypeVar

from ..errors import PlanError

K = TypeVar("K")

MAX_NAMES = 2**19
"""Maximum number of names of the patterns of one plan; a plan is untrusted input."""

MAX_NAME_LENGTH = 256
"""Maximum number of characters of an expanded name."""

NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_ITEM = re.compile(r"(0|[1-9][0-9]{0,8})(?:\.\.(0|[1-9][0-9]{0,8}))?")
FORBIDDEN = re.compile(r"[{}/\\\x00-\x1f\x7f]")
_COMPONENT = re.compile(r"\{[^{}]*\}|[^.{}/\\\x00-\x1f\x7f]+")


def expand(pattern: str, limit: int = MAX_NAMES) -> list[str]:
    """Return the names that a pattern expands to; the last number varies fastest."""
    components = _components(pattern)
    too_long = PlanError(f"a name of the pattern {shown(pattern)} has more than {MAX_NAME_LENGTH} characters")
    if len(components) > MAX_NAME_LENGTH:
        raise too_long
    choices = [_choices(pattern, component) for component in components]
    if sum(1 + len(str(choice[-1][-1])) for choice in choices) > MAX_NAME_LENGTH + 1:
        raise too_long
    count = math.prod(sum(map(len, choice)) for choice in choices)
    if count > limit:
        many = count if count < 2**63 else "far too many"  # its digits may fill a screen
        raise PlanError(f"the name pattern {shown(pattern)} expands to {many} names, more than {limit}")
    return [".".join(name) for name in product(*(list(map(str, chain(*choice))) for choice in choices))]


def expand_all(patterns: Iterable[str], limit: int = MAX_NAMES) -> list[str]:
    """Return the names of several patterns, one after another."""
    names: list[str] = []
    for pattern in patterns:
        names.extend(expand(pattern, limit - len(names)))
    return names


def grouped(patterns: Iterable[str], key: Callable[[str], K]) -> dict[K, tuple[str, ...]]:
    """Return the names that patterns expand to, as patterns, by a key of each name."""
    groups: dict[K, list[str]] = {}
    for name in expand_all(patterns):
        groups.setdefault(key(name), []).append(name)
    return {each: compress(names) for each, names in groups.items()}


def _components(pattern: str) -> list[str]:
    """Split at the dots that are not in braces."""
    if not pattern:
        return [""]
    components, at = [], 0
    while match := _COMPONENT.match(pattern, at):
        components.append(match[0])
        at = match.end()
        if at == len(pattern):
            return components
        if pattern[at] != ".":
            break
        at += 1
    raise _malformed(pattern)


def _choices(pattern: str, component: str) -> Sequence[Sequence[str | int]]:
    """Return the choices for a component, as runs: one text, or the numbers in its braces."""
    if not component.startswith("{"):
        return [[component]]
    spans: list[range] = []
    for item in component[1:-1].split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise _malformed(pattern)
        first, last = int(match[1]), int(match[2] or match[1])
        if (match[2] and first == last) or first > last or (spans and first <= spans[-1][-1]):
            raise PlanError(f"the numbers in the name pattern {shown(pattern)} do not ascend")
        spans.append(range(first, last + 1))
    return spans


def _malformed(pattern: str) -> PlanError:
    return PlanError(f"malformed name pattern {shown(pattern)}: one reads like 'h.{{0,2..5}}.attn'")


def shown(text: str) -> str:
    """Return a name or pattern for an error, of bounded length."""
    return repr(text if len(text) <= 200 else text[:200] + "...")


# The patterns that expand to given names, see ``names``.

_Numbers = tuple[int, ...]


_Key = tuple[tuple[int, int, str], ...]


def natural_key(name: str) -> _Key:
    """Return a key that sorts names by component, numbers by value: ``h.2`` before ``h.10``."""
    return tuple((0, int(c), "") if NUMBER.fullmatch(c) else (1, 0, c) for c in name.split("."))


def compress(names: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns that expand to exactly these names, in natural order of their first names.

    Names that differ only in numbers share a pattern if they are a full product of numbers;
    otherwise they are divided by the outermost number.
    """
    groups: dict[tuple[str | None, ...], set[_Numbers]] = {}
    for name in names:
        if name and (FORBIDDEN.search(name) or "" in name.split(".")):
            raise PlanError(
                f"the name {shown(name)} has an empty component, a brace, a slash or a control character"
            )
        components = name.split(".")
        skeleton = tuple(None if NUMBER.fullmatch(c) else c for c in components)
        groups.setdefault(skeleton, set()).add(tuple(int(c) for c in components if NUMBER.fullmatch(c)))
    patterns = [
        (natural_key(_fill(skeleton, [values[:1] for values in grid])), _fill(skeleton, grid))
        for skeleton, rows in groups.items()
        for grid in _products(frozenset(rows))
    ]
    return tuple(pattern for _, pattern in sorted(patterns))


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
    parts = (f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
    return "{" + ",".join(parts) + "}"
