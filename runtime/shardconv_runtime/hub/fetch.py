"""Converted directories on the Hub: each rank downloads what it reads, and the ranks of a host share it.

A repository holds a converted directory at its root, or one for each number of ranks in ``tp-2/``,
``tp-8/`` and so on. Everything lands in the cache of ``huggingface_hub``, which keeps two processes from
downloading the same file, goes on where a connection broke, and serves without a network what is complete.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled

from .. import manifest
from ..errors import SourceError
from ..manifest import MANIFEST_NAME, PLAN_NAME, FileEntry, Manifest
from ..messages import brief
from .access import FINAL, Hub, explain, require_repo_id

TRIES = 5
"""How often a file is asked for; the client itself tries several times in each."""

FIRST_WAIT_S = 0.5
"""Before the second try; each further one waits twice as long."""

NUM_THREADS = 8
"""Files that are downloaded at once."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A converted directory in a repository, of which some files are in the cache."""

    repo_id: str
    commit: str
    path: str
    """Of the directory in the repository: ``"tp-8/"``, or empty for its root."""
    directory: Path
    """In the cache."""
    hub: Hub

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Download files of the directory that are not in the cache.

        Raises:
            SourceError: some cannot be had; the message names them.
        """
        todo = [entry.path for entry in entries if not (self.directory / entry.path).is_file()]
        lost: list[tuple[str, Exception]] = []

        def one(path: str) -> None:
            try:
                _download(self.repo_id, self.path + path, replace(self.hub, revision=self.commit))
            except Exception as error:
                lost.append((path, error))

        with ThreadPoolExecutor(NUM_THREADS, "download") as pool:
            list(pool.map(one, todo))
        if lost:
            (path, error), more = min(lost), len(lost) - 1
            also = f" and {more} more files" if more else ""
            raise SourceError(
                f"{self.repo_id}: {self.path}{path}{also} cannot be downloaded: {brief(error)}; the same "
                "call goes on with what is in the cache"
            ) from error


def variant(path: Path, world_size: int) -> Path:
    """The converted directory for so many ranks in a directory: itself, or its ``tp-N/``."""
    inner = path / f"tp-{world_size}"
    if not (path / MANIFEST_NAME).is_file() and (inner / MANIFEST_NAME).is_file():
        return inner
    return path


def find(repo_id: str, hub: Hub, world_size: int) -> tuple[Repository, Manifest]:
    """The converted directory for so many ranks in a repository; its manifest and plan are downloaded.

    Raises:
        SourceError: the repository cannot be read, or holds nothing for so many ranks.
        CheckpointError: its manifest is malformed.
    """
    require_repo_id(repo_id)
    for path in (f"tp-{world_size}/", ""):
        try:
            found = Path(_download(repo_id, path + MANIFEST_NAME, hub))
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError) and (path == "" or not _is_offline(hub, error)):
                raise SourceError(explain(repo_id, hub, error)) from error
            continue
        except Exception as error:
            raise SourceError(explain(repo_id, hub, error)) from error
        commit = found.parts[-2 - path.count("/")]
        repository = Repository(repo_id, commit, path, found.parent, hub)
        try:
            _download(repo_id, path + PLAN_NAME, replace(hub, revision=commit))
        except Exception as error:
            raise SourceError(explain(repo_id, hub, error)) from error
        return repository, manifest.read(found.parent)
    raise SourceError(_nothing_for(repo_id, hub, world_size))


def plan_path(plan: str | os.PathLike[str], hub: Hub) -> Path:
    """A plan: a file, a converted directory, or ``user/repo/path/in/it.json`` on the Hub, downloaded.

    Raises:
        SourceError: there is none.
    """
    path = Path(plan).expanduser()
    if path.is_dir():
        return path / PLAN_NAME
    parts = os.fspath(plan).split("/", 2)
    if path.is_file() or len(parts) < 3 or parts[0] in ("", ".", "..", "~"):
        return path
    repo_id, name = "/".join(parts[:2]), parts[2]
    require_repo_id(repo_id)
    try:
        return Path(_download(repo_id, name, replace(hub, revision=None)))
    except Exception as error:
        raise SourceError(
            f"no such file: {plan}, and as one of a Hub repository: {explain(repo_id, hub, error)}"
        ) from error


def _nothing_for(repo_id: str, hub: Hub, world_size: int) -> str:
    start = f"{repo_id} holds no converted model for {world_size} rank{'s' if world_size > 1 else ''}"
    try:
        names = HfApi(token=hub.token).list_repo_files(repo_id, revision=hub.revision)
    except Exception as error:
        return f"{start}: {brief(error)}"
    sizes = [n.split("/")[0] for n in names if n.count("/") == 1 and n.endswith("/" + MANIFEST_NAME)]
    numbers = sorted(int(s[3:]) for s in sizes if s.startswith("tp-") and s[3:].isdigit())
    if not numbers:
        return f"{start} or any other number; convert it, or pass plan= to load it as it is"
    return f"{start}, but for {', '.join(map(str, numbers))}; start as many processes"


def _download(repo_id: str, path: str, hub: Hub) -> str:
    """A file of a repository in the cache; tries again where that may help."""
    for number in range(TRIES):
        try:
            return hf_hub_download(
                repo_id,
                path,
                revision=hub.revision,
                cache_dir=None if hub.cache_dir is None else os.fspath(hub.cache_dir),
                local_files_only=hub.local_files_only,
                token=hub.token,
            )
        except LocalEntryNotFoundError as error:
            if _is_offline(hub, error) or number == TRIES - 1:
                raise
        except FINAL:
            raise
        except Exception:
            if number == TRIES - 1:
                raise
        time.sleep(FIRST_WAIT_S * 2**number * random.uniform(0.5, 1.0))
    raise AssertionError("the last try raises")


def _is_offline(hub: Hub, error: Exception) -> bool:
    """Whether nothing was asked for."""
    return hub.local_files_only or isinstance(error.__cause__, OfflineModeIsEnabled)
