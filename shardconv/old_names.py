"""Functions of earlier versions, which name their successors. The next version does not have them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed(function: Callable[P, R], new: str) -> Callable[P, R]:
    """Return a function that warns, and then does the same.

    Args:
        function: the function of the earlier version.
        new: the call that replaces it.
    """

    @functools.wraps(function)
    def warning(*args: P.args, **kwargs: P.kwargs) -> R:
        warnings.warn(f"{function.__name__}() is now {new}", FutureWarning, stacklevel=2)
        return function(*args, **kwargs)

    return warning
