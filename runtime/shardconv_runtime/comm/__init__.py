"""Communication: process groups over mesh axes, collectives with their backward, control messages."""

from __future__ import annotations

import os

from ..errors import LaunchError


def env_int(name: str, default: int) -> int:
    """An environment variable that is a number.

    Raises:
        LaunchError: it is none.
    """
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise LaunchError(f"the environment variable {name} is {text!r}; it should be a number") from error
