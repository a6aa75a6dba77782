"""Locks of files, which the system releases when a process dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from shardconv_runtime.errors import ShardconvError

LOCK_NAME = "setup.lock"


class BusyError(ShardconvError):
    """Another process holds a lock."""


@contextmanager
def locked_journal(journal: Path, out: Path) -> Iterator[int]:
    """Open or create a journal that no other process has open.

    Raises:
        BusyError: another process has locked it.
    """
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
    """Whether another process has locked a journal at this moment."""
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
    """Wait until no other process begins or finishes.

    Raises:
        ShardconvError: another process completed ``out`` meanwhile, and removed the directory.
    """
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
    raise BusyError(f"OUT {out} is being written by another process; wait for it, or name another directory")


def _lock(handle: int, out: Path, how: int) -> bool:
    """Whether the lock was acquired."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ShardconvError(
            f"OUT {out} is on a file system without file locks ({error.strerror}); "
            "use another one, or mount it with locks"
        ) from error
    return True


def _completed(out: Path) -> ShardconvError:
    return ShardconvError(f"OUT {out} was completed by another process meanwhile; nothing is left to do")
