"""Converted directories on the Hub: each rank downloads the files that it reads, ranks of a host share them.

A repository holds a converted directory at its root, or one per number of ranks in ``tp-2/``, ``tp-8/`` and
so on. Files are stored in the cache of ``huggingface_hub``, which locks each file while it is downloaded,
resumes interrupted downloads, and serves complete files offline.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled

from ..errors import NotConvertedError, ShardconvError, SourceError, brief
from ..hub_options import Hub, require_repo_id
from ..storage import hub_time_limits
from ..storage.hub_errors import FINAL, explain, has_timed_out, hub_error, hub_failure
from ..storage.hub_time_limits import NoAnswerError, UnknownHostError, bounded
from ..storage.remote_files import remote_files
from . import manifest
from .manifest import MANIFEST_NAME, PLAN_NAME, FileEntry, Manifest, check_listed_sizes
from .small_files import stage_of, variant_name
from .tp_folders import directories_for, folder_in, nothing_for, only

TRIES = 5
"""Requests for one file; the client itself repeats each of them several times."""

FIRST_WAIT_S = 0.5
"""Wait before the second try; it doubles with each further one."""

NUM_THREADS = 8
"""Concurrent downloads."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A converted directory in a repository, and its copy in the cache, which may lack files."""

    repo_id: str
    commit: str
    path: str
    """The path of the directory in the repository: ``"tp-8/"``, or empty for its root."""
    directory: Path
    """The directory of its copy in the cache."""
    hub: Hub

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Download the files that the cache lacks."""
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
                "call resumes the download"
            ) from error

    def check_sizes(self, entries: Sequence[FileEntry]) -> None:
        """Check that files exist in the repository and have the sizes of the manifest; download none.

        Offline this checks nothing: files in the cache are complete.
        """
        if self.hub.local_files_only:
            return
        names = [self.path + entry.path for entry in entries]
        try:
            remote = remote_files(self.repo_id, self.commit, names, self.hub, must_exist=False)
        except SourceError as error:
            if isinstance(error.__cause__, OfflineModeIsEnabled):
                return
            raise
        sizes = {file.name.removeprefix(self.path): file.num_bytes for file in remote}
        where = f"{self.repo_id}: {self.path}"
        check_listed_sizes(where, sizes, entries, "push the converted directory again")


def find(where: str, hub: Hub, world_size: int, rank: int = 0) -> tuple[Repository, Manifest] | None:
    """Find a converted directory in a repository and download its manifest and plan.

    Returns:
        None if the repository has an ordinary model.
    """
    with _explained(where, hub):
        repo_id, directories = _directories(where, hub, world_size)
        if not directories:
            return None
        return _with_plan(repo_id, *directories[stage_of(rank, world_size, len(directories))], hub)


def beside(found: Repository, name: str) -> tuple[Repository, Manifest]:
    """Return another directory of a repository, at the same commit, with its manifest and plan."""
    around = found.path.rstrip("/").rpartition("/")[0]
    hub = replace(found.hub, revision=found.commit)
    with _explained(found.repo_id, found.hub):
        return _with_plan(found.repo_id, _inside(around, name), None, hub)


def find_all(where: str, hub: Hub, tp: int | None) -> list[tuple[Repository, Manifest]]:
    """Find a converted model in a repository, with the directories of all its stages."""
    with _explained(where, hub):
        repo_id, directories = _directories(where, hub, tp)
        if not directories:
            raise SourceError(nothing_for(repo_id, (), tp or 1))
        return [_with_plan(repo_id, path, file, hub) for path, file in directories]


@contextmanager
def _explained(where: str, hub: Hub) -> Iterator[None]:
    """Raise errors of the client as our own within this context."""
    try:
        yield
    except ShardconvError:
        raise
    except Exception as error:
        raise hub_failure(explain(folder_in(where)[0], hub.revision, error), error) from error


def _directories(where: str, hub: Hub, world_size: int | None) -> tuple[str, list[tuple[str, Path | None]]]:
    """Return the id of a repository, and a model's directories in it: one, or one for each stage.

    Each has its path, and the file of its manifest if that was downloaded to find it. There are none in the
    repository of an ordinary model.
    """
    repo_id, folder = folder_in(where)
    require_repo_id(repo_id)
    if folder is not None:
        return repo_id, [(path, None) for path in folder.parts]
    if world_size is None:
        return repo_id, [(path, None) for path in only(repo_id, _names(repo_id, hub))]
    for path in (variant_name(world_size), ""):
        file = _existing(repo_id, _inside(path, MANIFEST_NAME), hub, is_last=False)
        if file is not None:
            return repo_id, [(path, file)]
    try:
        return repo_id, [(path, None) for path in directories_for(repo_id, _names(repo_id, hub), world_size)]
    except NotConvertedError:
        _existing(repo_id, MANIFEST_NAME, hub, is_last=True)  # offline, names the file that the cache lacks
        raise


def _inside(path: str, name: str) -> str:
    """Return the path of a file of a directory, which is empty for the root."""
    return f"{path}/{name}" if path else name


def plan_path(plan: str | os.PathLike[str], hub: Hub) -> Path:
    """Return the path of a plan's file; a plan on the Hub is downloaded."""
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
        text = f"no such file: {plan}, and as one of a Hub repository: {explain(repo_id, None, error)}"
        raise hub_failure(text, error) from error


def _with_plan(repo_id: str, path: str, file: Path | None, hub: Hub) -> tuple[Repository, Manifest]:
    """Return the converted directory at ``path`` of a repository, with its manifest and plan in the cache."""
    file = file or Path(_download(repo_id, _inside(path, MANIFEST_NAME), hub))
    commit = file.parts[-2 - _inside(path, "").count("/")]
    _download(repo_id, _inside(path, PLAN_NAME), replace(hub, revision=commit))
    return Repository(repo_id, commit, _inside(path, ""), file.parent, hub), manifest.read(file.parent)


def _existing(repo_id: str, path: str, hub: Hub, *, is_last: bool) -> Path | None:
    """Download a file; None if the repository (or, offline, the cache) lacks it."""
    try:
        return Path(_download(repo_id, path, hub))
    except LocalEntryNotFoundError as error:
        if is_last or not _is_offline(hub, error):
            raise
    except EntryNotFoundError:
        pass
    return None


def _names(repo_id: str, hub: Hub) -> list[str]:
    """Return the files of a repository; offline, its files in the cache."""
    if not hub.local_files_only:
        try:
            with bounded():
                return HfApi(token=hub.token).list_repo_files(repo_id, revision=hub.revision)
        except OfflineModeIsEnabled:
            pass
    cache = None if hub.cache_dir is None else Path(hub.cache_dir)
    snapshot = Path(snapshot_download(repo_id, revision=hub.revision, cache_dir=cache, local_files_only=True))
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]


def _download(repo_id: str, path: str, hub: Hub) -> str:
    """Download a file to the cache; retry if that may help."""
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
            tries = 2 if isinstance(hub_error(error), UnknownHostError) else TRIES
            if number >= tries - 1 or not _may_help(error, hub, time.monotonic() - begin):
                raise
        time.sleep(FIRST_WAIT_S * 2**number * random.uniform(0.5, 1.0))
    raise AssertionError("the last try raises")


def _may_help(error: Exception, hub: Hub, seconds: float) -> bool:
    """Return whether another try to download may help, after ``seconds`` of tries.

    The client repeats requests that time out by itself, some for minutes.
    """
    if isinstance(error, LocalEntryNotFoundError):
        if _is_offline(hub, error):
            return False
    elif isinstance(error, FINAL):
        return False
    return not isinstance(hub_error(error), NoAnswerError) and not (
        has_timed_out(error) and seconds >= hub_time_limits.PATIENCE_S
    )


def _is_offline(hub: Hub, error: Exception) -> bool:
    """Return whether no request was sent."""
    return hub.local_files_only or isinstance(error.__cause__, OfflineModeIsEnabled)
