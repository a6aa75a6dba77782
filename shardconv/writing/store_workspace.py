"""A directory in an object store while it is written, to survive crashes: files in place, the manifest last.

    URL/.partial/job.json       everything that determines the output, and the objects that it replaces
    URL/.partial/OWNER.json     the finished files of an owner with their checksums, and who writes it
    URL/rank-.../*.safetensors  complete as soon as they are there
    URL/manifest.json           makes the directory complete

A store has no locks, and nobody can see whether a process is alive. So the process that begins last writes
an owner: it puts its own mark into the owner's record, under the condition that the record is as it was
read. Each finished file is recorded under the same condition. A process whose record was taken ends with an
error.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardconv_runtime.errors import OutputExistsError, ShardconvError
from shardconv_runtime.files.manifest import (
    COMMON_DIRECTORY,
    MANIFEST_NAME,
    PARTIAL,
    PLAN_NAME,
    UNUSED_NAME,
    FileEntry,
)

from .durable import BusyError
from .job import JOB_NAME, Job, TargetFile, as_json, difference
from .store_objects import StoreDirectory, Version
from .streamed_files import Digests, StreamedFiles
from .workspace import Claim, largest

_TRIES = 5
"""Times that the job is read again after another process has changed it."""


@dataclass(frozen=True, slots=True)
class StoredJob:
    """The content of ``job.json``."""

    job: Job
    paths: tuple[str, ...]
    """Objects that the job may have written."""
    old: tuple[str, ...] = ()
    """Objects of an earlier output, until they are removed."""


def read_job(store: StoreDirectory) -> tuple[StoredJob, Version] | None:
    """Return the job that was begun in a directory; None if none was."""
    record = store.read(f"{PARTIAL}/{JOB_NAME}")
    if record is None:
        return None
    try:
        document = json.loads(record.data)
        stored = StoredJob(dict(document["job"]), tuple(document["paths"]), tuple(document["old"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ShardconvError(
            f"{store.url}/{PARTIAL}/{JOB_NAME}, the state of an earlier run, cannot be read; remove "
            f"{store.url}/{PARTIAL} and run again"
        ) from error
    return stored, record.version


@dataclass
class _Owner:
    """The record of an owner that this process writes."""

    content: dict[str, Any]
    version: Version


@dataclass(eq=False)
class StoredWorkspace:
    """A directory in an object store that is being written, with the owners that this process has claimed."""

    store: StoreDirectory
    files: tuple[TargetFile, ...]
    """Files of all owners."""
    path: Path
    """A directory on this machine for small files, until they are sent."""
    digest: str
    """The sha256 of the job, in hex."""
    claims: dict[str, _Owner]
    """The claimed owners."""
    last: str
    """The file that makes the directory complete."""
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The records of finished files of all owners by path, when ``checksums`` was called."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    is_in_order = True

    @property
    def name(self) -> str:
        """The URL."""
        return self.store.url

    @property
    def owners(self) -> Collection[str]:
        """The owners that this process writes."""
        return self.claims.keys()

    @property
    def is_finishing(self) -> bool:
        """Whether another process, or an earlier one, has completed the directory."""
        return self.store.read(self.last) is not None

    def missing(self) -> list[int]:
        """Return the indices of the files of claimed owners that are not finished."""
        finished = self._finished({owner: claim.content for owner, claim in self.claims.items()})
        return [i for i, f in enumerate(self.files) if f.owner in self.claims and f.path not in finished]

    def target(self, missing: Sequence[int], memory: int) -> StreamedFiles:
        """Begin to send files."""
        files = {index: self.files[index] for index in missing}
        return StreamedFiles(files, self.store, memory // 2, self.finish_file)  # the rest is for reading

    def finish_file(self, index: int, digests: Digests) -> None:
        """Record a file that was sent."""
        file = self.files[index]
        claim = self.claims[file.owner]
        with self.lock:
            claim.content["files"][file.path] = {**asdict(digests), "measured": dict(file.measured())}
            version = self.store.replace(_record(file.owner), _encoded(claim.content), claim.version)
            if version is None:
                if self.is_finishing:
                    raise ShardconvError(
                        f"DST {self.name} was completed by another process meanwhile; nothing is left to do"
                    )
                raise BusyError(
                    f"DST {self.name}: another process has begun to write {file.owner}; let that one go on, "
                    "or run the same command again to take its place"
                )
            claim.version = version

    def checksums(self) -> dict[str, str] | None:
        """Return the checksum of each file by path; None while one is missing."""
        self.finished = self._finished(self._records())
        if len(self.finished) < len(self.files):
            return None
        return {path: record["checksum"] for path, record in self.finished.items()}

    def unfinished(self) -> list[str]:
        """Return the owners of missing files."""
        return sorted({file.owner for file in self.files if file.path not in self.finished})

    def measured(self) -> dict[str, float]:
        """Return the numbers about weights in the finished files of all owners, by name, see ``largest``."""
        return largest(each for record in self.finished.values() for each in record["measured"].items())

    def entry(self, file: TargetFile, checksum: str, rank: int | None) -> FileEntry:
        """Return the entry of a finished file in a manifest."""
        if file.path == UNUSED_NAME:
            return FileEntry(file.path, file.num_bytes, checksum)
        sample = self.finished[file.path]["sample"]
        return FileEntry(file.path, file.num_bytes, checksum, rank, sample)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Do nothing: two processes that finish at once write the same bytes."""
        yield

    def finish(self, paths: Sequence[str], replaced: Sequence[str]) -> None:
        """Send the small files, the last of ``paths`` at the end, and remove the records.

        Replaced files were removed at the beginning.
        """
        assert not replaced
        current = read_job(self.store)
        if current is None and self.is_finishing:
            return  # another part was faster
        if current is None or _digest(current[0].job) != self.digest:
            raise BusyError(f"DST {self.name}: another process has begun another conversion; let it go on")
        # If this job is given up now, the next one finds the objects to remove.
        renewed = StoredJob(current[0].job, tuple(sorted({*current[0].paths, *paths})))
        self.store.replace(f"{PARTIAL}/{JOB_NAME}", _encoded(asdict(renewed)), current[1])
        for path in paths:
            if (self.path / path).is_file():
                self.store.write(path, self.path / path)
        self.finish_again()

    def finish_again(self) -> None:
        """Remove the records of a complete directory."""
        names = [name for name in self.store.listed().objects if name.startswith(f"{PARTIAL}/")]
        # The job goes last, so that a run which dies here leaves no records without it.
        self.store.remove(name for name in names if name != f"{PARTIAL}/{JOB_NAME}")
        self.store.remove(name for name in names if name == f"{PARTIAL}/{JOB_NAME}")

    def _records(self) -> dict[str, dict[str, Any]]:
        """Return the records of all owners; this process's are known."""
        owners = {file.owner for file in self.files}
        others = owners - self.claims.keys()
        records = {owner: _read_record(self.store, owner, self.digest)[0] for owner in others}
        return records | {owner: claim.content for owner, claim in self.claims.items()}

    def _finished(self, records: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the records of files that are still there as they were sent, by path."""
        objects = self.store.listed().objects
        finished = {}
        for file in self.files:
            record = records.get(file.owner, {"files": {}})["files"].get(file.path)
            stored = objects.get(file.path)
            if record is None or stored is None or stored.num_bytes != file.num_bytes:
                continue
            marks = {mark.strip('"') for mark in (record["e_tag"], stored.etag)} - {""}
            if len(marks) < 2:
                finished[file.path] = record
        return finished


@contextmanager
def opened_in_store(
    url: str,
    job: Job,
    files: Sequence[TargetFile],
    claim: Claim,
    replaced: Collection[str],
    last: str = MANIFEST_NAME,
    *,
    tell: Callable[[str], None],
) -> Iterator[StoredWorkspace]:
    """Claim owners in a directory of a store, and continue the job that was begun there, or begin.

    The common part is written by the process that writes the first rank. For other arguments see ``opened``
    of ``workspace``.

    Args:
        replaced: the objects of the complete directory that is replaced.
        last: the file that makes the directory complete.
    """
    store, job = StoreDirectory(url), as_json(job)
    owners = {file.owner for file in files}
    claimed = set(claim.required)
    if min(owners - {COMMON_DIRECTORY}, default=COMMON_DIRECTORY) in {*claimed, COMMON_DIRECTORY}:
        claimed |= owners & set(claim.optional)
    paths = (*sorted(file.path for file in files), PLAN_NAME, last)
    _agree(store, job, paths, replaced, owners != {*claim.required, *claim.optional}, tell)
    digest = _digest(job)
    claims = {owner: _claimed(store, owner, digest) for owner in sorted(claimed)}
    with tempfile.TemporaryDirectory(prefix="shardconv-") as small:
        yield StoredWorkspace(store, tuple(files), Path(small), digest, claims, last)


def _agree(
    store: StoreDirectory,
    job: Job,
    paths: tuple[str, ...],
    replaced: Collection[str],
    is_part: bool,
    tell: Callable[[str], None],
) -> None:
    """Make this the job of the directory; the objects of another one are removed."""
    name = f"{PARTIAL}/{JOB_NAME}"
    for _ in range(_TRIES):
        current = read_job(store)
        stored, version = (None, None) if current is None else current
        if stored is None or stored.job != job:
            old = {*replaced, *((*stored.paths, *stored.old) if stored is not None else ())}
            if stored is not None:
                reason = difference(stored.job, job)
                if is_part:
                    raise OutputExistsError(
                        f"DST {store.url} holds parts of another conversion ({reason}); use the same model "
                        f"and options for all parts, or remove {store.url}/{PARTIAL}"
                    )
                tell(f"{reason}: the unfinished output in {store.url} is discarded")
            stored = StoredJob(job, paths, tuple(sorted(old)))
            version = store.replace(name, _encoded(asdict(stored)), version)
            if version is None:
                continue  # another part has begun meanwhile
        if stored.old:
            # Without its manifest, the old output is not complete any more. Files of the same names are
            # replaced later: another part may have written them already.
            there = store.listed().objects
            store.remove(path for path in paths[-1:] if path in there)
            store.remove(path for path in stored.old if path in there and path not in paths)
            store.replace(name, _encoded(asdict(StoredJob(job, stored.paths))), version)
        return
    raise BusyError(f"DST {store.url} is being written by another process; wait for it, or name another URL")


def _claimed(store: StoreDirectory, owner: str, digest: str) -> _Owner:
    """Put the mark of this process into the record of an owner."""
    for _ in range(_TRIES):
        content, version = _read_record(store, owner, digest)
        content["writer"] = uuid.uuid4().hex
        if (new := store.replace(_record(owner), _encoded(content), version)) is not None:
            return _Owner(content, new)
    raise BusyError(f"DST {store.url}: another process writes {owner}; wait for it, or name another URL")


def _read_record(store: StoreDirectory, owner: str, digest: str) -> tuple[dict[str, Any], Version | None]:
    """Return the record of an owner, empty if it is of another job, and its version."""
    empty: dict[str, Any] = {"job": digest, "files": {}}
    record = store.read(_record(owner))
    if record is None:
        return empty, None
    try:
        content: dict[str, Any] = json.loads(record.data)
        return (content if content["job"] == digest else empty), record.version
    except (ValueError, TypeError, KeyError):
        return empty, record.version


def _digest(job: Job) -> str:
    return hashlib.sha256(_encoded(job)).hexdigest()


def _record(owner: str) -> str:
    """Return the name of the record of an owner."""
    return f"{PARTIAL}/{owner}.json"


def _encoded(content: Any) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()
