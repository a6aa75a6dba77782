"""Writes the missing files of a workspace; each is durable and journaled as soon as it is complete."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass, field

from shardconv_runtime.checkpoint.copying import PlacedTensor, plan_units, run
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.files.checksums import PIECE_BYTES, of_pieces, piece_checksum, pieces_of

from ..reporting.progress import Progress
from .workspace import Workspace


def fill(workspace: Workspace, *, memory: int, progress: Progress) -> None:
    """Write the missing files of the locked owners, through I/O buffers of ``memory`` bytes."""
    missing = workspace.missing()
    # The n-th files of all ranks hold parts of the same parameters. They are written together, so the source
    # is read once for any number of ranks, and a crash costs at most about one file of each.
    turn: dict[int, int] = {}
    num_files: Counter[str] = Counter()
    for index in missing:
        owner = workspace.files[index].owner
        turn[index] = num_files[owner]
        num_files[owner] += 1
    placed = (
        PlacedTensor(workspace.files[index].tensor(name), index, offset)
        for index in missing
        for name, offset in workspace.files[index].offsets.items()
    )
    units = plan_units(placed, memory)
    units.sort(key=lambda unit: min(turn[move.file] for move in unit.moves))  # stable: else as in the source
    total = sum(file.num_bytes for file in workspace.files if file.owner in workspace.journals)
    rest = sum(workspace.files[index].num_bytes for index in missing)
    for index in missing:
        workspace.unfinished_path(index).unlink(missing_ok=True)
    _require_space(workspace, rest)
    try:
        with progress.bar("writing", total, total - rest) as advance, _Target(workspace) as target:
            advance(sum(len(workspace.files[index].header) for index in missing))
            for index in missing:
                if workspace.files[index].num_bytes == len(workspace.files[index].header):
                    target.open(index)  # no unit opens it
            run(units, lambda: _Sink(target), lambda unit, sink: advance(sink.num_bytes))
    except OSError as error:
        raise ShardconvError(
            f"DST {workspace.out} cannot be written: {error.strerror or error}; correct that and run the "
            "same command again, which continues"
        ) from error


def _require_space(workspace: Workspace, num_bytes: int) -> None:
    stats = os.statvfs(workspace.path)
    free = stats.f_bavail * stats.f_frsize
    if num_bytes > free:
        needed, left = (f"{amount / 1e9:,.2f} GB" for amount in (num_bytes, free))
        raise ShardconvError(
            f"DST {workspace.out} needs {needed} more, and its disk has {left} free; "
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


class _Target:
    """The files of a workspace that are being written, by several threads."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._files: dict[int, _OpenFile] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            os.close(file.handle)

    def open(self, index: int) -> _OpenFile:
        """Return a file; the first call creates it in its final size and writes its header."""
        with self._lock:
            if index in self._files:
                return self._files[index]
            planned, path = self._workspace.files[index], self._workspace.unfinished_path(index)
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            pieces = pieces_of(planned.num_bytes)
            file = self._files[index] = _OpenFile(handle, pieces, [size for _, size in pieces])
            os.ftruncate(handle, planned.num_bytes)
            self.put(index, 0, memoryview(planned.header))
            return file

    def put(self, index: int, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of a file; the last bytes of the file finish it."""
        file = self.open(index)
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
            self._workspace.finish_file(index, checksum)


@dataclass
class _Sink:
    """A writer for the bytes of one unit, which counts them."""

    target: _Target
    num_bytes: int = 0

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of a file."""
        self.num_bytes += len(data)
        self.target.put(file, offset, data)
