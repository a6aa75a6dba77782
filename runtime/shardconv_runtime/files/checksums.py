"""Checksums of the files of a converted directory, computed by several threads.

The checksum of a shard is the CRC-32 of the CRC-32s of its pieces of 32 MiB (four bytes each, little endian),
which can be written and read in any order. The checksum of any other file is the sha256 of its bytes.
With sha256 for shards, a conversion on two cores with a fast disk took half as long again.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from ..errors import CheckpointError, DamagedError
from ..storage.file_access import WeightFile, is_local
from .manifest import OF_PIECES, FileEntry, sha256_of

PIECE_BYTES = 1 << 25
"""Part of the format: other pieces give another checksum."""

READ_BYTES = 1 << 20
"""Bytes of one read, few enough to stay in a core's cache until they are read again."""

MAX_THREADS = 16


def piece_checksum(handle: int, start: int, num_bytes: int) -> int:
    """Return the CRC-32 of a range of bytes of an open file; ``CheckpointError`` if the file ends before."""
    value, buffer = 0, memoryview(bytearray(min(READ_BYTES, num_bytes)))
    at, stop = start, start + num_bytes
    while at < stop:
        count = os.preadv(handle, [buffer[: stop - at]], at)
        if not count:
            raise DamagedError(f"ends at byte {at:,}: it was cut off while it was read")
        value = zlib.crc32(buffer[:count], value)
        at += count
    return value


def of_pieces(values: Iterable[int]) -> str:
    """Return the checksum of a shard, given the CRC-32s of its pieces in order."""
    return f"{OF_PIECES}:{zlib.crc32(b''.join(struct.pack('<I', value) for value in values)):08x}"


def shard_checksum(path: Path) -> str:
    """Return the checksum of a shard."""
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(_num_threads(), "checksum") as pool:
        pieces = pieces_of(os.fstat(file.fileno()).st_size)
        return of_pieces(pool.map(lambda piece: piece_checksum(file.fileno(), *piece), pieces))


def checksums(
    files: Mapping[FileEntry, WeightFile], advance: Callable[[int], object] = lambda num_bytes: None
) -> dict[FileEntry, str | CheckpointError]:
    """Return the checksum of each file, of the kind in its entry, or the reason why it cannot be read.

    The files have the sizes in their entries; ``advance`` is called with the bytes of each finished part.
    """
    pieces: dict[FileEntry, dict[int, int]] = {entry: {} for entry in files}
    results: dict[FileEntry, str | CheckpointError] = {}
    num_threads = _num_threads() if all(map(is_local, files.values())) else MAX_THREADS
    with ThreadPoolExecutor(num_threads, "checksum") as pool:
        tasks: dict[Future[int | str], tuple[FileEntry, int, int]] = {}
        for entry, path in files.items():
            if entry.checksum.startswith(f"{OF_PIECES}:"):
                for start, num_bytes in pieces_of(entry.num_bytes):
                    tasks[pool.submit(_piece_of_path, path, start, num_bytes)] = entry, start, num_bytes
            else:
                tasks[pool.submit(_checksum_of_path, path)] = entry, 0, entry.num_bytes
        try:
            for task in as_completed(tasks):
                entry, start, num_bytes = tasks[task]
                try:
                    part = task.result()
                except CheckpointError as error:
                    results[entry] = error
                except OSError as error:
                    results[entry] = CheckpointError(f"cannot be read ({error.strerror or error})")
                else:
                    if isinstance(part, int):
                        pieces[entry][start] = part
                    else:
                        results[entry] = part
                advance(num_bytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {
        entry: results.get(entry) or of_pieces(value for _, value in sorted(pieces[entry].items()))
        for entry in files
    }


def pieces_of(num_bytes: int) -> list[tuple[int, int]]:
    """Return the first byte and the size of each piece of a file."""
    return [(start, min(PIECE_BYTES, num_bytes - start)) for start in range(0, num_bytes, PIECE_BYTES)]


def _piece_of_path(path: WeightFile, start: int, num_bytes: int) -> int:
    if not is_local(path):
        return zlib.crc32(path.reader().read(start, num_bytes))
    with open(path, "rb", buffering=0) as file:
        return piece_checksum(file.fileno(), start, num_bytes)


def sha256_of_file(path: WeightFile) -> str:
    """Return the sha256 (hex) of a file, which may be read over a network."""
    if is_local(path):
        return sha256_of(path)
    value, reader = hashlib.sha256(), path.reader()
    for start, num_bytes in pieces_of(path.num_bytes):
        value.update(reader.read(start, num_bytes))
    return value.hexdigest()


def _checksum_of_path(path: WeightFile) -> str:
    return f"sha256:{sha256_of_file(path)}"


def _num_threads() -> int:
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))
