"""What a user is told to give or to do: as one types it, or as one writes it in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_num_commands = 0


@contextmanager
def of_commands() -> Iterator[None]:
    """Within it this process is a command, whose user types options."""
    global _num_commands
    _num_commands += 1
    try:
        yield
    finally:
        _num_commands -= 1


def is_command() -> bool:
    """Whether the user types options."""
    return _num_commands > 0


def option(name: str) -> str:
    """An option or an argument by its name in Python: ``--local-files-only`` or ``local_files_only=``."""
    return f"--{name.replace('_', '-')}" if is_command() else f"{name}="


def again() -> str:
    """To be done once the reason of an error is gone."""
    return "run the same command again" if is_command() else "try again"
