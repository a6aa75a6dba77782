"""Files on this machine, on the Hub and in object stores, asked in one way.

A file is a ``Path`` or a ``RemoteFile``; only this module asks which of them it is.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..format.header import StoredTensor, read_header

if TYPE_CHECKING:  # it imports the client of the Hub
    from typing_extensions import TypeIs

    from .remote_files import RemoteFile

WeightFile: TypeAlias = "Path | RemoteFile"

_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_local(file: WeightFile) -> TypeIs[Path]:
    """Return whether a file is on this machine, where it may be missing."""
    return isinstance(file, Path)


def num_bytes(file: WeightFile) -> int:
    """Return the size of a file that exists."""
    return file.stat().st_size if is_local(file) else file.num_bytes


def header(file: WeightFile) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the metadata and the tensors of a safetensors file, in the order of their bytes."""
    return read_header(file) if is_local(file) else file.header()


def read_bytes(file: WeightFile, count: int | None = None) -> bytes:
    """Return the first ``count`` bytes of a file, by default all."""
    if is_local(file):
        with file.open("rb") as opened:
            return opened.read(count)
    return bytes(file.reader().read(0, file.num_bytes if count is None else count))


def name_in(directory: Path, file: WeightFile) -> str:
    """Return the path of a file in the directory of its model, or in its repository."""
    return file.relative_to(directory).as_posix() if is_local(file) else file.name


def known_sha256(file: WeightFile) -> str:
    """Return the sha256 (hex) of a file on the Hub or in its cache, which names large files by it; otherwise
    ``""``."""
    if not is_local(file):
        return file.sha256
    blob = file.resolve()
    return blob.name if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) else ""


def identity(file: WeightFile) -> str:
    """Return text that changes when a file does: its hash if the Hub or its cache knows it, otherwise size
    and time."""
    if not is_local(file):
        return file.identity
    stats = file.stat()
    seconds, rest = divmod(stats.st_mtime_ns, 10**9)
    when = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return known_sha256(file) or f"{stats.st_size} bytes of {when}.{rest:09}"


def stamp(file: WeightFile) -> list[object]:
    """Return values that change when a file does, also if another one takes its place, size and time."""
    if not is_local(file):
        return [file.num_bytes, file.identity]
    stats = file.stat()
    return [stats.st_size, stats.st_mtime_ns, stats.st_ino]
