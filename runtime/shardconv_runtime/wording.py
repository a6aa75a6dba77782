"""Names of options in messages: as a user types them on the command line, or writes them in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_num_commands = 0


@contextmanager
def of_commands() -> Iterator[None]:
    """In this context messages address the user of a command."""
    global _num_commands
    _num_commands += 1
    try:
        yield
    finally:
        _num_commands -= 1


def is_command() -> bool:
    """Whether messages address the user of a command."""
    return _num_commands > 0


def option(name: str) -> str:
    """``--local-files-only`` in a command, ``local_files_only=`` in Python.

    Args:
        name: of the Python argument.
    """
    return f"--{name.replace('_', '-')}" if is_command() else f"{name}="


def again() -> str:
    """Return the advice to repeat what failed."""
    return "run the same command again" if is_command() else "try again"
