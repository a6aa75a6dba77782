"""Keyword arguments that a function does not have: a misspelled one names the nearest, a moved one its place.

Functions with many options keep an exact signature, which an editor completes and a type checker reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from .errors import UnknownOptionError

CLOSE = 0.6
"""Similarity of names, from 0 to 1, of which one may be a misspelling of the other."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Moved:
    """Where an argument of an earlier version is now."""

    argument: str
    """The argument that has it."""
    value_class: type | None = None
    """The class of that argument's value, of which it is a field; None: it only has another name."""
    needs: bool = False
    """Whether the argument must have been given, as True or as a value: it turns something on."""


def moved_fields(argument: str, value_class: type, *, needs: bool = False) -> dict[str, Moved]:
    """Return where the fields of an argument's value are now, which were arguments themselves."""
    names = value_class.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: Moved(argument, value_class, needs) for name in names}


def checked_keywords(
    moved: Mapping[str, Moved] | None = None, remedies: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """Refuse keyword arguments that a function does not have, with the one that is meant.

    Args:
        moved: arguments of earlier versions -> where they are now. They still work, with a
            ``FutureWarning``.
        remedies: arguments of other libraries' functions that do the same -> the remedy.
    """

    def decorate(function: F) -> F:
        names = list(signature(function).parameters)

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for name in sorted(keywords.keys() - set(names)):
                if name not in (moved or {}):
                    raise UnknownOptionError(_unknown(function.__name__, name, names, remedies or {}))
                _move(function.__name__, name, keywords, (moved or {})[name])
            return function(*args, **keywords)

        return call  # type: ignore[return-value]

    return decorate


def unknown_attribute(module: str, name: str, names: Collection[str]) -> AttributeError:
    """Return the error for an attribute that a module does not have, with the name that is meant."""
    nearest = get_close_matches(name, names, 1, CLOSE)
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)


def _unknown(function: str, name: str, names: list[str], remedies: Mapping[str, str]) -> str:
    message = f"{function}() has no argument {name}="
    if name in remedies:
        return f"{message}: {remedies[name]}"
    nearest = get_close_matches(name, names, 1, CLOSE)
    if nearest:
        return f"{message}; the nearest is {nearest[0]}="
    return f"{message}; its arguments are {', '.join(names)}"


def _move(function: str, name: str, keywords: dict[str, Any], to: Moved) -> None:
    """Put an argument of an earlier version in its new place."""
    value = keywords.pop(name)
    if to.value_class is None:
        if keywords.get(to.argument) is not None:
            raise UnknownOptionError(f"{function}(): {name}= is the old name of {to.argument}=; give one")
        place, keywords[to.argument] = f"{to.argument}=", value
    else:
        around = keywords.get(to.argument)
        if to.needs and not around:
            raise UnknownOptionError(
                f"{function}(): {name}= is a field of {to.argument}={to.value_class.__name__}(...), and "
                f"{to.argument}= was not given; pass both, or leave it out"
            )
        around = around if isinstance(around, to.value_class) else to.value_class()
        place = f"{to.argument}={to.value_class.__name__}({name}=...)"
        keywords[to.argument] = replace(around, **{name: value})  # type: ignore[type-var]
    warnings.warn(f"{function}(): {name}= is now {place}", FutureWarning, stacklevel=4)
