"""From the user's path or Hub id to a local directory, downloading it if needed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import snapshot_download

from ..errors import SourceError
from ..hub.access import require_repo_id
from ..hub.hub_errors import explain
from ..hub.remote_files import RemoteFile, remote_files
from ..hub.time_limits import bounded
from ..hub_options import Hub
from .weight_files import LAYOUTS, wanted_weights

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.spm", "tokenizer*")
"""Files of a model repository, other than weights and code, that may be needed at run time."""


@dataclass(frozen=True, slots=True)
class Located:
    """The location of a model."""

    directory: Path
    """Local, with at least the config."""
    commit: str | None = None
    """Of a Hub repository."""
    remote: tuple[RemoteFile, ...] = ()
    """The weight files that stay on the Hub."""


def locate(
    model: str | os.PathLike[str], hub: Hub, *, code: bool, need_weights: bool, stream: bool = False
) -> Located:
    """The directory of the model and, for a Hub repository, its commit.

    Args:
        model: a directory, or the id of a Hub repository.
        hub: how to download.
        code: download Python files too.
        need_weights: download the weights too.
        stream: leave weights on the Hub if they are safetensors files and not in the cache.

    Raises:
        SourceError: ``model`` is neither a directory nor a repository that can be downloaded.
    """
    text = os.fspath(model)
    path = Path(text).expanduser()
    if path.is_dir():
        return Located(path)
    if path.exists():
        raise SourceError(f"{text} is a file; give the directory that holds config.json and the weights")
    if path.is_symlink():
        raise SourceError(f"{text} is a link to {os.readlink(path)}, which does not exist; mend the link")
    require_repo_id(text)
    directory = _download(text, hub, SMALL_FILES + (("*.py",) if code else ()))
    commit = directory.name
    if not need_weights:
        return Located(directory, commit)
    names = wanted_weights(directory)
    if stream and not hub.local_files_only and (remote := _remote(text, commit, directory, names, hub)):
        return Located(directory, commit, remote)
    _download(text, replace(hub, revision=commit), names)
    return Located(directory, commit)


def _remote(
    repo_id: str, commit: str, directory: Path, names: tuple[str, ...], hub: Hub
) -> tuple[RemoteFile, ...]:
    """The weight files on the Hub; none if all are in the cache, or they are of another format."""
    chosen = [name for name in names if name.endswith(".safetensors")]
    index = [name for single, name in LAYOUTS if (directory / name).is_file()]
    if index and len(chosen) > 1:
        chosen.remove(LAYOUTS[0][0])  # the single file beside the files of an index
    if not chosen or all((directory / name).is_file() for name in chosen):
        return ()
    found = remote_files(repo_id, commit, chosen, hub, must_exist=bool(index))
    return found if len(found) == len(chosen) else ()


def _download(repo_id: str, hub: Hub, patterns: tuple[str, ...]) -> Path:
    try:
        with bounded():
            found = snapshot_download(
                repo_id,
                revision=hub.revision,
                cache_dir=None if hub.cache_dir is None else Path(hub.cache_dir),
                local_files_only=hub.local_files_only,
                token=hub.token,
                allow_patterns=list(patterns),
            )
        return Path(found)
    except Exception as error:  # including errors of the HTTP library
        raise SourceError(explain(repo_id, hub.revision, error)) from error
