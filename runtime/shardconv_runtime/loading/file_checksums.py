"""The checksums of a rank's files, compared with those in the manifest before they are read."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import CheckpointError
from ..format.manifest import MANIFEST_NAME, FileEntry, Manifest, resolve, sha256_checksum
from ..format.manifest_writing import is_intact

BLOCK_BYTES = 1 << 22
"""Read at once."""
MAX_THREADS = 8
"""Files that are read at a time."""


def verify_checksums(directory: Path, manifest: Manifest, rank: int) -> None:
    """Read all files of a rank, ``common/`` included, and compare their checksums; the manifest has its own.

    Raises:
        CheckpointError: a file has other bytes than were written, or cannot be read.
    """
    if not is_intact((directory / MANIFEST_NAME).read_text(encoding="utf-8")):
        raise CheckpointError(
            f"{directory}: {MANIFEST_NAME} is not the file that was written; copy it again, or convert again"
        )
    entries = list(manifest.files_of(rank))
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        found = list(pool.map(lambda entry: _checksum(directory, entry), entries))
    for entry, checksum in zip(entries, found, strict=True):
        if checksum != entry.checksum:
            raise CheckpointError(
                f"{directory}: {entry.path} is not the file that was written: its checksum is {checksum}, "
                f"and {entry.checksum} in the manifest; copy it again, or convert the model again"
            )


def _checksum(directory: Path, entry: FileEntry) -> str:
    path = resolve(directory, entry.path)
    try:
        return _crc32(path) if entry.checksum.startswith("crc32:") else sha256_checksum(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _crc32(path: Path) -> str:
    value = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return f"crc32:{value:08x}"
