"""A directory that many processes write and that appears only once it is complete.

It is made next to its final path, and renamed when all of it is on disk. A directory that it replaces is
renamed first, and removed last, so that at any moment one of the two is complete:

    .OUT.partial-TOKEN     being written
    .OUT.replaced-TOKEN    was OUT; only while OUT is replaced

The next run that writes to OUT cleans up after a run that died. The processes need a shared file system.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..comm import agreement
from ..errors import CheckpointError, ShardconvError
from .replicas import Replicas

KnownFiles = Callable[[Path], Collection[str]]
"""Returns the files of a directory that may be replaced, relative to it; raises ``CheckpointError`` if the
directory is of another kind."""


@dataclass(frozen=True)
class Staging:
    """A directory that is being made."""

    out: Path
    """Its final path."""
    path: Path
    """Its path until ``commit``."""

    def commit(self) -> None:
        """Move the directory to its final path; one process calls it, when all is written.

        Raises:
            OSError: the directory cannot be renamed; ``out`` is unchanged.
        """
        for path in self.path.rglob("*"):
            if path.is_dir():
                _fsync(path)
        _fsync(self.path)
        if not self.out.exists() or not any(self.out.iterdir()):
            self.path.rename(self.out)
            _fsync(self.out.parent)
            return
        replaced = _beside(self.out, "replaced", self.path.name.rpartition("-")[2])
        self.out.rename(replaced)
        try:
            self.path.rename(self.out)
        except OSError:
            replaced.rename(self.out)
            raise
        _fsync(self.out.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove the directory; one process calls it."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def staged(
    replicas: Replicas, out: Path, *, overwrite: bool, known: KnownFiles, apart_from: Path | None = None
) -> Iterator[Staging]:
    """Make a staging directory, and remove it if the context raises; see ``begin`` for the arguments."""
    staging = begin(replicas, out, overwrite=overwrite, known=known, apart_from=apart_from)
    try:
        yield staging
    except BaseException:
        if replicas.is_leader:
            staging.discard()
        raise


def begin(
    replicas: Replicas, out: Path, *, overwrite: bool, known: KnownFiles, apart_from: Path | None = None
) -> Staging:
    """Check on one process that a directory may be made, and make its staging directory.

    Args:
        replicas: the processes that write; each of them calls it.
        out: absolute, without links. It may exist if it is empty.
        overwrite: ``out`` may also hold ``known`` files, and no others.
        known: returns the files that an earlier run wrote to ``out``.
        apart_from: a directory that is read, which may not contain ``out`` or be inside it.

    Raises:
        ShardconvError: ``out`` may not be made or replaced, or is not on a file system that all share.
    """
    made: Path | None = None
    error: Exception | None = None
    if replicas.is_leader:
        try:
            _require_free(out, overwrite, known, apart_from)
            out.parent.mkdir(parents=True, exist_ok=True)
            for rest in (*_left(out, "partial"), *_left(out, "replaced")):
                shutil.rmtree(rest)
            made = _beside(out, "partial", secrets.token_hex(8))
            made.mkdir()
        except OSError as failure:
            error = CheckpointError(f"{out} cannot be made: {failure.strerror or failure}")
            error.__cause__ = failure
        except Exception as failure:
            error = failure
    replicas.agree(error)
    path = next(path for path in agreement.exchange(replicas.launch, made) if path is not None)
    staging = Staging(out, path)
    try:
        unshared = CheckpointError(
            f"{out}: rank 0 made {path}, which this rank does not see; use a file system that all ranks share"
        )
        replicas.agree(None if path.is_dir() else unshared)
    except ShardconvError:
        if replicas.is_leader:
            staging.discard()
        raise
    return staging


def _require_free(out: Path, overwrite: bool, known: KnownFiles, apart_from: Path | None) -> None:
    if apart_from is not None and (out.is_relative_to(apart_from) or apart_from.is_relative_to(out)):
        raise ShardconvError(
            f"of {out} and {apart_from}, which was loaded, one contains the other; name another directory"
        )
    # Put back a replaced directory after a run that died between two renames.
    for replaced in _left(out, "replaced"):
        if not out.exists():
            replaced.rename(out)
    if out.exists() and not out.is_dir():
        raise ShardconvError(f"{out} is a file; name a directory that does not exist yet")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ShardconvError(f"{out} is not empty; name another directory, or pass overwrite=True")
    try:
        written = known(out)
    except CheckpointError as error:
        raise ShardconvError(f"{out} cannot be replaced: {error}; name another directory") from error
    files = (file for file in out.rglob("*") if file.is_symlink() or not file.is_dir())
    if others := sorted({file.relative_to(out).as_posix() for file in files} - set(written)):
        raise ShardconvError(f"{out} holds {others[0]}, which shardconv did not write; move it away first")


def _beside(out: Path, kind: str, token: str) -> Path:
    return out.with_name(f".{out.name}.{kind}-{token}")


def _left(out: Path, kind: str) -> list[Path]:
    """Return directories that earlier runs left next to ``out``."""
    if not out.parent.is_dir():
        return []
    return sorted(path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.{kind}-"))


def _fsync(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
