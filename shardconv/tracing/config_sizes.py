"""Sizes in a config and those in it, under names that many configs use."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def nodes(config: Any) -> list[Any]:
    """A config and those in it, outer ones first."""
    out = [config]
    for node in out:
        values = vars(node).values() if hasattr(node, "__dict__") else ()
        out += [v for v in values if hasattr(v, "to_dict") and hasattr(v, "model_type")]
    return out


def first_int(config: Any, names: Collection[str]) -> int:
    """The first positive int under one of the names, outer configs and earlier names first; else 0."""
    return next(iter(all_ints(config, names)), 0)


def all_ints(config: Any, names: Collection[str]) -> list[int]:
    """The positive ints under these names, each once, outer configs and earlier names first."""
    found = (int_of(n, name) for n in nodes(config) for name in names)
    return list(dict.fromkeys(value for value in found if value > 0))


def has(node: Any, name: str) -> bool:
    """Whether a config says anything under a name."""
    return getattr(node, name, None) is not None


def int_of(node: Any, name: str) -> int:
    """The int of a config under a name; 0 if there is none."""
    value = getattr(node, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def pair(value: Any) -> tuple[int, int] | None:
    """Both sides of what is said as one int or as two."""
    if isinstance(value, int) and value > 0:
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(v, int) for v in value):
        return int(value[0]), int(value[1])
    return None
