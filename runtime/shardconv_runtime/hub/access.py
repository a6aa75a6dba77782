"""How the Hub is reached, and what its client's errors mean to a user."""

from __future__ import annotations

import os
from dataclasses import dataclass

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..errors import SourceError
from ..messages import brief


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
    """An error of the client in words, with what to do."""
    at = f" at revision {hub.revision}" if hub.revision else ""
    start = f"no such directory: {repo_id}, and as a Hub id"
    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated on the Hub; accept its terms there, then pass a token or log in"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no revision {hub.revision} on the Hub; check the revision"
    if isinstance(error, RepositoryNotFoundError):
        return f"{start} it does not exist or is private; check the spelling, or pass a token"
    if isinstance(error, LocalEntryNotFoundError) and hub.local_files_only:
        return f"{start} it is not in the local cache{at}; allow downloads, or fill the cache"
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return f"{repo_id} lacks a file on the Hub{at}: {brief(error)}"
    if isinstance(error, HfHubHTTPError):
        return f"{start} it cannot be read{at}: {brief(error)}; check the token and try again"
    return f"{start} it cannot be reached{at} ({type(error).__name__}); check the path or the network"


def require_repo_id(text: str) -> None:
    """Refuse what cannot be the id of a repository.

    Raises:
        SourceError: it looks like a path.
    """
    looks_like_path = text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1
    try:
        if not looks_like_path:
            validate_repo_id(text)
            return
    except HFValidationError:
        pass
    raise SourceError(f"no such directory: {text} (and it is not a Hub id); check the path")
