"""How the Hub is reached, and what its client's errors mean to a user."""

from __future__ import annotations

import os
from dataclasses import dataclass

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..errors import SourceError
from ..messages import brief
from .errors import hub_error, status_of


@dataclass(frozen=True, slots=True)
class Hub:
    """How to reach the Hub; the fields are those of ``huggingface_hub``."""

    revision: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    token: str | bool | None = None


FINAL = (GatedRepoError, RevisionNotFoundError, RepositoryNotFoundError, EntryNotFoundError)
"""Errors that another try does not mend."""


def explain(repo_id: str, hub: Hub, error: Exception) -> str:
    """An error of reading a repository in words, with what to do."""
    at = f" at revision {hub.revision}" if hub.revision else ""
    start = f"no such directory: {repo_id}, and as a Hub id"
    found, status = hub_error(error) or error, status_of(error)
    if isinstance(found, GatedRepoError):
        return f"{repo_id} is gated on the Hub; accept its terms there, then pass a token or log in"
    if isinstance(found, RevisionNotFoundError):
        return f"{repo_id} has no revision {hub.revision} on the Hub; check the revision"
    if isinstance(found, RepositoryNotFoundError):
        return f"{start} it does not exist or is private; check the spelling, or pass a token"
    if isinstance(found, (OfflineModeIsEnabled, LocalEntryNotFoundError)):
        return f"{start} it is not in the local cache{at}; allow downloads (no --local-files-only)"
    if isinstance(found, EntryNotFoundError):
        return f"{repo_id} lacks a file on the Hub{at}: {brief(found)}"
    if status == 401:
        return f"{start} it is not for this token{at}; log in, or pass another token"
    if status is not None:
        return f"{start} it cannot be read{at}: {brief(found)}; check the token and try again"
    return f"{start} it cannot be reached{at} ({type(found).__name__}); check the path or the network"


def looks_like_path(text: str) -> bool:
    """Whether a text is certainly not the id of a repository."""
    return text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1


def require_repo_id(text: str) -> None:
    """Refuse what cannot be the id of a repository.

    Raises:
        SourceError: it looks like a path.
    """
    try:
        if not looks_like_path(text):
            validate_repo_id(text)
            return
    except HFValidationError:
        pass
    raise SourceError(f"no such directory: {text} (and it is not a Hub id); check the path")
