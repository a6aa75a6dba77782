"""Converted directories on the Hub: each rank downloads what it reads, and the ranks of a host share it.

A repository holds a converted directory at its root, or one for each number of ranks in ``tp-2/``,
``tp-8/`` and so on. Everything lands in the cache of ``huggingface_hub``, which keeps two processes from
downloading the same file, goes on where a connection broke, and serves without a network what is complete.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled

from ..errors import CheckpointError, ShardconvError, SourceError, brief
from ..format import manifest
from ..format.manifest import MANIFEST_NAME, PLAN_NAME, FileEntry, Manifest
from ..hub.tp_folders import nothing_for, only
from . import time_limits as silence
from .access import Hub, require_repo_id
from .hub_errors import FINAL, explain, has_timed_out, hub_error
from .remote_files import remote_files
from .time_limits import NoAnswerError, bounded

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

    def check_sizes(self, entries: Sequence[FileEntry]) -> None:
        """Check that files of the directory are there and whole, as far as their sizes tell; download none.

        Without a network there is nothing to check: what is in the cache is whole.

        Raises:
            CheckpointError: one is missing, or of another size.
            SourceError: the Hub cannot be asked.
        """
        if self.hub.local_files_only:
            return
        names = [self.path + entry.path for entry in entries]
        try:
            found = remote_files(self.repo_id, self.commit, names, self.hub, must_exist=False)
        except SourceError as error:
            if isinstance(error.__cause__, OfflineModeIsEnabled):
                return
            raise
        sizes = {file.name: file.num_bytes for file in found}
        for entry in entries:
            size = sizes.get(self.path + entry.path)
            if size != entry.num_bytes:
                is_there = "is not there" if size is None else f"has {size} bytes"
                raise CheckpointError(
                    f"{self.repo_id}: {self.path}{entry.path} {is_there} and should have {entry.num_bytes} "
                    "bytes; push the converted directory again"
                )


def find(repo_id: str, hub: Hub, world_size: int | None) -> tuple[Repository, Manifest]:
    """A converted directory in a repository; its manifest and plan are downloaded.

    Args:
        repo_id: of the repository.
        hub: how to reach it.
        world_size: for so many ranks; None: for whatever number, if there is only one.

    Raises:
        SourceError: the repository cannot be read, or holds nothing for so many ranks, or too much.
        CheckpointError: its manifest is malformed.
    """
    require_repo_id(repo_id)
    try:
        if world_size is None:
            path = only(repo_id, _names(repo_id, hub))
            return _with_plan(repo_id, path, Path(_download(repo_id, path + MANIFEST_NAME, hub)), hub)
        for path in (f"tp-{world_size}/", ""):
            found = _existing(repo_id, path + MANIFEST_NAME, hub, is_last=not path)
            if found is not None:
                return _with_plan(repo_id, path, found, hub)
        problem = nothing_for(repo_id, _names(repo_id, hub), world_size)
    except ShardconvError:
        raise
    except Exception as error:
        raise SourceError(explain(repo_id, hub.revision, error)) from error
    raise SourceError(problem)


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
            f"no such file: {plan}, and as one of a Hub repository: {explain(repo_id, None, error)}"
        ) from error


def _with_plan(repo_id: str, path: str, manifest_path: Path, hub: Hub) -> tuple[Repository, Manifest]:
    """The converted directory at ``path`` of a repository, whose manifest is in the cache."""
    directory, commit = manifest_path.parent, manifest_path.parts[-2 - path.count("/")]
    _download(repo_id, path + PLAN_NAME, replace(hub, revision=commit))
    return Repository(repo_id, commit, path, directory, hub), manifest.read(directory)


def _existing(repo_id: str, path: str, hub: Hub, *, is_last: bool) -> Path | None:
    """A file of a repository in the cache; None: there is none.

    Args:
        repo_id: of the repository.
        path: of the file.
        hub: how to reach it.
        is_last: no other place is left: that it is not in the cache, and nothing was asked for, is an error.
    """
    try:
        return Path(_download(repo_id, path, hub))
    except LocalEntryNotFoundError as error:
        if is_last or not _is_offline(hub, error):
            raise
    except EntryNotFoundError:
        pass
    return None


def _names(repo_id: str, hub: Hub) -> list[str]:
    """Of the files of a repository; of those in the cache, where nothing may be asked for."""
    if not hub.local_files_only:
        try:
            with bounded():
                return HfApi(token=hub.token).list_repo_files(repo_id, revision=hub.revision)
        except OfflineModeIsEnabled:
            pass
    cache = None if hub.cache_dir is None else Path(hub.cache_dir)
    found = Path(snapshot_download(repo_id, revision=hub.revision, cache_dir=cache, local_files_only=True))
    return [path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()]


def _download(repo_id: str, path: str, hub: Hub) -> str:
    """A file of a repository in the cache; tries again where that may help."""
    begin = time.monotonic()
    for number in range(TRIES):
        try:
            with bounded():
                return hf_hub_download(
                    repo_id,
                    path,
                    revision=hub.revision,
                    cache_dir=None if hub.cache_dir is None else os.fspath(hub.cache_dir),
                    local_files_only=hub.local_files_only,
                    token=hub.token,
                )
        except Exception as error:
            if number == TRIES - 1 or not _may_help(error, hub, time.monotonic() - begin):
                raise
        time.sleep(FIRST_WAIT_S * 2**number * random.uniform(0.5, 1.0))
    raise AssertionError("the last try raises")


def _may_help(error: Exception, hub: Hub, seconds: float) -> bool:
    """Whether another try to download may help, after all tries so far took so long.

    The client repeats a time-out by itself, some for minutes.
    """
    if isinstance(error, LocalEntryNotFoundError):
        if _is_offline(hub, error):
            return False
    elif isinstance(error, FINAL):
        return False
    return not isinstance(hub_error(error), NoAnswerError) and not (
        has_timed_out(error) and seconds >= silence.PATIENCE_S
    )


def _is_offline(hub: Hub, error: Exception) -> bool:
    """Whether nothing was asked for."""
    return hub.local_files_only or isinstance(error.__cause__, OfflineModeIsEnabled)
