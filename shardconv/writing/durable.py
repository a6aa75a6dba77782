"""Files and names that survive a crash of the machine, and locks that end with their process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from shardconv_runtime.errors import ShardconvError

LOCK_NAME = "setup.lock"


class BusyError(ShardconvError):
    """Another process holds a lock."""


@contextmanager
def locked_journal(journal: Path, out: Path) -> Iterator[int]:
    """Open or create a journal that no other process has open."""
    handle = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        if not _lock(handle, out, fcntl.LOCK_EX | fcntl.LOCK_NB):
            refuse(out)
        yield handle
    finally:
        os.close(handle)


def unlock(handle: int) -> None:
    """Release a lock before the file is closed."""
    fcntl.flock(handle, fcntl.LOCK_UN)


def is_locked(journal: Path, out: Path) -> bool:
    """Return whether another process has locked a journal at this moment."""
    try:
        handle = os.open(journal, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _lock(handle, out, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two processes may ask at once
    finally:
        os.close(handle)


@contextmanager
def setup_lock(path: Path, out: Path) -> Iterator[None]:
    """Wait until no other process begins or finishes; an error if one has completed ``out`` meanwhile."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError as error:
        raise _completed(out) from error
    try:
        _lock(handle, out, fcntl.LOCK_EX)
        if not path.exists() or not os.path.samestat(os.fstat(handle), path.stat()):
            raise _completed(out)
        yield
    finally:
        os.close(handle)


def refuse(out: Path) -> NoReturn:
    """Raise ``BusyError``."""
    raise BusyError(f"DST {out} is being written by another process; wait for it, or name another directory")


def _lock(handle: int, out: Path, how: int) -> bool:
    """Acquire a lock of an open file, and return whether it was free."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ShardconvError(
            f"DST {out} is on a file system without file locks ({error.strerror}); "
            "use another one, or mount it with locks"
        ) from error
    return True


def _completed(out: Path) -> ShardconvError:
    return ShardconvError(f"DST {out} was completed by another process meanwhile; nothing is left to do")


def write_durably(path: Path, text: str) -> None:
    """Write a small file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.new")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_directories(root: Path) -> None:
    """Make the names in a directory and in all directories below it durable."""
    for path in (*(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink()), root):
        fsync(path)


def remove(root: Path, paths: Iterable[str]) -> None:
    """Remove files below ``root`` that exist, and directories that are then empty."""
    for path in paths:
        file = root / path
        file.unlink(missing_ok=True)
        for parent in file.relative_to(root).parents:
            if parent != Path():
                with suppress(OSError):  # others may have files in it
                    (root / parent).rmdir()
