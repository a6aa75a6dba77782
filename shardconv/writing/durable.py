"""Files and names that survive a crash of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


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
                _remove_if_empty(root / parent)


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        return
