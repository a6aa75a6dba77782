"""From what the user typed to a local directory, downloading it where it is a Hub id."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from shardconv_runtime.errors import SourceError

from .checkpoint import wanted_weights
from .messages import brief

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.spm", "tokenizer*")
"""Everything but weights and code that a model repository may need at run time."""


@dataclass(frozen=True, slots=True)
class Hub:
    """How to reach the Hub; the fields are those of ``huggingface_hub``."""

    revision: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    token: str | bool | None = None


def locate(
    model: str | os.PathLike[str], hub: Hub, *, code: bool, need_weights: bool
) -> tuple[Path, str | None]:
    """The directory of the model and, for a Hub repository, its commit.

    Args:
        model: a directory, or the id of a Hub repository.
        hub: how to download.
        code: download Python files too.
        need_weights: download the weights too.

    Raises:
        SourceError: neither a directory nor a repository that can be had.
    """
    text = os.fspath(model)
    path = Path(text).expanduser()
    if path.is_dir():
        return path, None
    if path.exists():
        raise SourceError(f"{text} is a file; give the directory that holds config.json and the weights")
    _require_repo_id(text)
    directory = _download(text, hub, SMALL_FILES + (("*.py",) if code else ()))
    if need_weights:
        _download(text, hub, wanted_weights(directory))
    return directory, directory.name


def _require_repo_id(text: str) -> None:
    looks_like_path = text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1
    try:
        if not looks_like_path:
            validate_repo_id(text)
            return
    except HFValidationError:
        pass
    raise SourceError(f"no such directory: {text} (and it is not a Hub id); check the path")


def _download(repo_id: str, hub: Hub, patterns: tuple[str, ...]) -> Path:
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=hub.revision,
                cache_dir=None if hub.cache_dir is None else Path(hub.cache_dir),
                local_files_only=hub.local_files_only,
                token=hub.token,
                allow_patterns=list(patterns),
            )
        )
    except Exception as error:  # the HTTP library's own errors come through too
        raise SourceError(_explain(repo_id, hub, error)) from error


def _explain(repo_id: str, hub: Hub, error: Exception) -> str:
    at = f" at revision {hub.revision}" if hub.revision else ""
    start = f"no such directory: {repo_id}, and as a Hub id"
    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated on the Hub; accept its terms there, then pass --token or log in"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no revision {hub.revision} on the Hub; check --revision"
    if isinstance(error, RepositoryNotFoundError):
        return f"{start} it does not exist or is private; check the spelling, or pass --token"
    if isinstance(error, LocalEntryNotFoundError) and hub.local_files_only:
        return f"{start} it is not in the local cache{at}; leave out --local-files-only to download it"
    if isinstance(error, HfHubHTTPError):
        return f"{start} it cannot be read{at}: {brief(error)}; check --token and try again"
    return f"{start} it cannot be reached{at} ({type(error).__name__}); check the path or the network"
