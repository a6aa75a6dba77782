"""Checksums of files, read in stretches by several threads at once."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from shardconv_runtime.errors import CheckpointError
from shardconv_runtime.format import manifest
from shardconv_runtime.format.manifest import FileEntry

from ...reporting.progress import Advance
from ...writing.crc32 import Extent, join

STRETCH_BYTES = 1 << 26
"""Bytes of a shard that one thread takes at a time."""

READ_BYTES = 1 << 20

MAX_THREADS = 16


def checksums(files: Mapping[FileEntry, Path], advance: Advance) -> dict[FileEntry, str | CheckpointError]:
    """The checksum of each file, of the kind that its entry has, or why it cannot be read.

    Shards are read in stretches by several threads at once.

    Args:
        files: where each one is; of the size that its entry says.
        advance: told the bytes as they are done.
    """
    parts: dict[FileEntry, list[Extent]] = {entry: [] for entry in files}
    found: dict[FileEntry, str | CheckpointError] = {}
    with ThreadPoolExecutor(_num_threads(), "checksum") as pool:
        tasks = _submit(pool, files)
        try:
            for task in as_completed(tasks):
                entry, num_bytes = tasks[task]
                try:
                    part = task.result()
                except CheckpointError as error:
                    found[entry] = error
                else:
                    if isinstance(part, Extent):
                        parts[entry].append(part)
                    else:
                        found.setdefault(entry, part)
                advance(num_bytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {entry: found.get(entry) or _crc(parts[entry]) for entry in files}


def _num_threads() -> int:
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


def _submit(
    pool: ThreadPoolExecutor, files: Mapping[FileEntry, Path]
) -> dict[Future[Extent | str], tuple[FileEntry, int]]:
    """The tasks, each with its file and its bytes."""
    tasks: dict[Future[Extent | str], tuple[FileEntry, int]] = {}
    for entry, path in files.items():
        if not entry.checksum.startswith("crc32:"):
            tasks[pool.submit(_sha256, path)] = entry, entry.num_bytes
            continue
        for start in range(0, entry.num_bytes, STRETCH_BYTES):
            stop = min(start + STRETCH_BYTES, entry.num_bytes)
            tasks[pool.submit(_stretch, path, start, stop)] = entry, stop - start
    return tasks


def _stretch(path: Path, start: int, stop: int) -> Extent:
    buffer = memoryview(bytearray(min(READ_BYTES, stop - start)))
    crc, at = 0, start
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while at < stop:
                count = file.readinto(buffer[: stop - at])
                if not count:
                    raise CheckpointError(f"ends at byte {at:,}: it was cut off while it was read")
                crc, at = zlib.crc32(buffer[:count], crc), at + count
    except OSError as error:
        raise CheckpointError(f"cannot be read at byte {at:,} ({error.strerror or error})") from error
    return Extent(start, stop - start, crc)


def _sha256(path: Path) -> str:
    try:
        return manifest.sha256_checksum(path)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror or error})") from error


def _crc(extents: Iterable[Extent]) -> str:
    joined = join(extents)
    return f"crc32:{joined[0].crc32 if joined else 0:08x}"
