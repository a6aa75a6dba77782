"""How models are named, on the Hub and in object stores, and how messages name options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .errors import MissingModelError, OptionError


@dataclass(frozen=True, slots=True)
class Hub:
    """How to reach the Hub; the fields have the meaning that ``huggingface_hub`` gives them.

    ``cache_dir`` is also where ``load`` keeps a copy of a converted directory in an object store.
    """

    revision: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    token: str | bool | None = None


SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
"""How URLs of object stores begin: S3 and servers of its protocol, Google Cloud Storage, Azure."""

_URL = re.compile(r"([a-z][a-z0-9]*)://")
_SECRET = re.compile(r"[a-z0-9]+://[^/@]*:[^/]*@")
_URL_OF_PATH = re.compile(rf"({'|'.join(SCHEMES)}):/[^/]")


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return whether a place is a URL such as ``s3://bucket/model``.

    Raises:
        OptionError: it is one of no known store, went through a ``Path``, or has credentials in it.
    """
    text = os.fspath(place)
    if _URL_OF_PATH.match(text):
        raise OptionError(f"{text} is a URL that lost a slash, as in a Path; pass it as a string")
    match = _URL.match(text)
    if match is not None and match[1] not in SCHEMES:
        raise OptionError(
            f"{text}: no store has URLs that begin with {match[1]}://; they begin with "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}"
        )
    if match is not None and (_SECRET.match(text) or "?" in text):
        raise OptionError(
            f"a URL that begins with {match[0]} holds a password or a query, and it would be written to "
            "files; leave them out, and put credentials into the environment"
        )
    return match is not None


def looks_like_path(text: str) -> bool:
    """Return whether a text cannot be the id of a repository."""
    return text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1


def require_repo_id(text: str) -> None:
    """Refuse a text that cannot be the id of a repository."""
    problem = MissingModelError(f"no such directory: {text} (and it is not a Hub id); check the path")
    if looks_like_path(text):
        raise problem
    folder = text.partition("/")[0]
    if "/" in text and os.path.isdir(folder):
        raise OptionError(
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
