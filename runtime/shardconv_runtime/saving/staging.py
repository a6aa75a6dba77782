"""A directory that many processes write and that is there whole or not at all.

It is made beside its place, and renamed when all of it is on disk. One that it replaces is renamed first,
and removed last, so that at any moment one of the two is whole:

    .OUT.partial-TOKEN     being written
    .OUT.replaced-TOKEN    was OUT; only while OUT is replaced

What a run that died left of these is put in order by the next one that writes to OUT. The processes need a
file system that they share.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ..comm import agreement
from ..errors import CheckpointError, ShardconvError
from .replicas import Everyone

KnownFiles = Callable[[Path], Collection[str]]
"""The files of a directory that may be replaced, relative to it; raises ``CheckpointError`` if it is of
another kind."""


@dataclass(frozen=True)
class Staging:
    """A directory that is being made."""

    out: Path
    """Its place."""
    path: Path
    """Where it is until then."""

    def commit(self) -> None:
        """Put the directory in its place; one process calls it, when all is written.

        Raises:
            OSError: it cannot be renamed; what was in its place is as it was.
        """
        _fsync_below(self.path)
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
        """Remove what was made; one process calls it."""
        shutil.rmtree(self.path, ignore_errors=True)


def begin(
    everyone: Everyone, out: Path, *, overwrite: bool, contents: KnownFiles, apart_from: Path | None = None
) -> Staging:
    """Check that a directory may be made, on one process, and make the place where it grows.

    Args:
        everyone: the processes that write; each of them calls it.
        out: absolute, without links. It may be there if it is empty.
        overwrite: it may also hold ``contents``, and nothing else.
        contents: says what an earlier run wrote there.
        apart_from: a directory that is read, which ``out`` may not hold or be in.

    Raises:
        ShardconvError: it may not be made or replaced, or is not on a file system that all see.
    """
    made: Path | None = None
    error: Exception | None = None
    if everyone.is_leader:
        try:
            _require_free(out, overwrite, contents, apart_from)
            made = _make(out)
        except Exception as failure:
            error = _named(out, failure)
    everyone.agree(error)
    path = next(path for path in agreement.exchange(everyone.launch, made) if path is not None)
    staging = Staging(out, path)
    try:
        everyone.agree(None if path.is_dir() else CheckpointError(_unshared(out, path)))
    except ShardconvError:
        if everyone.is_leader:
            staging.discard()
        raise
    return staging


def _restore(out: Path) -> None:
    """Put back what was to be replaced where a run died between two renames."""
    for replaced in _left(out, "replaced"):
        if not out.exists():
            replaced.rename(out)


def _require_free(out: Path, overwrite: bool, contents: KnownFiles, apart_from: Path | None) -> None:
    if apart_from is not None and (out.is_relative_to(apart_from) or apart_from.is_relative_to(out)):
        raise ShardconvError(f"{out} and {apart_from}, which was loaded, are one in the other; name another")
    _restore(out)
    if out.exists() and not out.is_dir():
        raise ShardconvError(f"{out} is a file; name a directory that does not exist yet")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ShardconvError(f"{out} is not empty; name another directory, or pass overwrite=True")
    try:
        known = contents(out)
    except CheckpointError as error:
        raise ShardconvError(f"{out} cannot be replaced: {error}; name another directory") from error
    found = (file.relative_to(out).as_posix() for file in out.rglob("*") if _is_file(file))
    if foreign := sorted(set(found) - set(known)):
        raise ShardconvError(f"{out} holds {foreign[0]}, which shardconv did not write; move it away first")


def _is_file(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()


def _make(out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    for rest in (*_left(out, "partial"), *_left(out, "replaced")):
        shutil.rmtree(rest)
    path = _beside(out, "partial", secrets.token_hex(8))
    path.mkdir()
    return path


def _beside(out: Path, kind: str, token: str) -> Path:
    return out.with_name(f".{out.name}.{kind}-{token}")


def _left(out: Path, kind: str) -> list[Path]:
    """What earlier runs left beside ``out``."""
    if not out.parent.is_dir():
        return []
    return sorted(path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.{kind}-"))


def _named(out: Path, failure: Exception) -> Exception:
    if isinstance(failure, OSError):
        error = CheckpointError(f"{out} cannot be made: {failure.strerror or failure}")
        error.__cause__ = failure
        return error
    return failure


def _unshared(out: Path, path: Path) -> str:
    return (
        f"{out}: rank 0 made {path}, which is not there on this rank; use a file system that all ranks share"
    )


def _fsync_below(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_dir():
            _fsync(path)
    _fsync(root)


def _fsync(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
