"""Options for reaching the Hub, and how messages name options: on the command line, or in Python."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .errors import SourceError


@dataclass(frozen=True, slots=True)
class Hub:
    """How to reach the Hub; the fields have the meaning that ``huggingface_hub`` gives them."""

    revision: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    token: str | bool | None = None


def looks_like_path(text: str) -> bool:
    """Return whether a text cannot be the id of a repository."""
    return text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1


def require_repo_id(text: str) -> None:
    """Refuse a text that cannot be the id of a repository."""
    problem = SourceError(f"no such directory: {text} (and it is not a Hub id); check the path")
    if looks_like_path(text):
        raise problem
    folder = text.partition("/")[0]
    if "/" in text and os.path.isdir(folder):
        raise SourceError(
            f"no such directory: {text}, and {folder} is a directory here, so that it is not taken for a Hub "
            "id; check the path, or run this from another directory"
        )
    # Not for --help, nor for a text that is clearly a path.
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(text)
    except HFValidationError:
        raise problem from None


_num_commands = 0


@contextmanager
def of_commands() -> Iterator[None]:
    """Address messages to the user of a command within this context."""
    global _num_commands
    _num_commands += 1
    try:
        yield
    finally:
        _num_commands -= 1


def is_command() -> bool:
    """Return whether messages address the user of a command."""
    return _num_commands > 0


def option(name: str) -> str:
    """Return ``--local-files-only`` in a command, ``local_files_only=`` in Python."""
    return f"--{name.replace('_', '-')}" if is_command() else f"{name}="


def again() -> str:
    """Return the advice to repeat the failed action."""
    return "run the same command again" if is_command() else "try again"
