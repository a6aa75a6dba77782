"""Files that are written to a disk, at any place; each is durable and finished as soon as it is complete."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.files.checksums import PIECE_BYTES, of_pieces, piece_checksum, pieces_of
from shardconv_runtime.files.manifest import PARTIAL

from .job import TargetFile


def require_space(out: Path, num_bytes: int) -> None:
    """Raise ``ShardconvError`` if the disk of a directory has too little space."""
    stats = os.statvfs(out / PARTIAL)
    free = stats.f_bavail * stats.f_frsize
    if num_bytes > free:
        needed, left = (f"{amount / 1e9:,.2f} GB" for amount in (num_bytes, free))
        raise ShardconvError(
            f"DST {out} needs {needed} more, and its disk has {left} free; "
            "free some space, or name a directory on another disk"
        )


@dataclass(eq=False)
class _OpenFile:
    """A file that is being written."""

    handle: int
    pieces: list[tuple[int, int]]
    """First byte and size of each piece."""
    missing: list[int]
    """Number of bytes of each piece that are not written yet."""
    checksums: dict[int, int] = field(default_factory=dict)
    """CRC-32s of whole pieces."""


class LocalFiles:
    """The files of a run that are being written to a disk, by several threads."""

    def __init__(
        self,
        files: Sequence[TargetFile],
        path_of: Callable[[int], Path],
        finish: Callable[[int, str], object],
    ) -> None:
        """Prepare to write.

        Args:
            path_of: returns where a file is while it is written.
            finish: is called with the checksum of a file that is complete and durable.
        """
        self._planned, self._path_of, self._finish_file = files, path_of, finish
        self._files: dict[int, _OpenFile] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> LocalFiles:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            os.close(file.handle)

    def open(self, index: int) -> None:
        """Create a file in its final size with its header."""
        self._file(index)

    def begin_unit(self) -> None:
        """Do nothing: bytes are written at once."""

    def end_unit(self, num_bytes: int) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing: each file is finished by its last bytes."""

    def stop(self) -> None:
        """Do nothing: no thread waits."""

    def _file(self, index: int) -> _OpenFile:
        """Return a file; the first call creates it."""
        with self._lock:
            if index in self._files:
                return self._files[index]
            planned, path = self._planned[index], self._path_of(index)
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            pieces = pieces_of(planned.num_bytes)
            file = self._files[index] = _OpenFile(handle, pieces, [size for _, size in pieces])
            os.ftruncate(handle, planned.num_bytes)
            self.put(index, 0, memoryview(planned.header))
            return file

    def put(self, index: int, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of a file; the last bytes of the file finish it."""
        file = self._file(index)
        begin, end = offset, offset + len(data)
        while len(data):
            count = os.pwrite(file.handle, data, offset)
            data, offset = data[count:], offset + count
        for piece in range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)):
            start, size = file.pieces[piece]
            with self._lock:
                file.missing[piece] -= min(end, start + size) - max(begin, start)
                is_whole = file.missing[piece] == 0
            if is_whole:
                self._finish_piece(index, file, piece)

    def _finish_piece(self, index: int, file: _OpenFile, piece: int) -> None:
        """Read a whole piece back from the page cache for its checksum; the last one finishes the file."""
        value = piece_checksum(file.handle, *file.pieces[piece])
        # Linux begins to write the piece to the disk; otherwise the fsync at the end would have to do it all.
        os.posix_fadvise(file.handle, *file.pieces[piece], os.POSIX_FADV_DONTNEED)
        with self._lock:
            file.checksums[piece] = value
            if len(file.checksums) < len(file.pieces):
                return
        os.fsync(file.handle)
        with self._lock:
            os.close(self._files.pop(index).handle)
            checksum = of_pieces(value for _, value in sorted(file.checksums.items()))
            self._finish_file(index, checksum)
