"""Writes the planned files of a workspace: copies, checksums, and a journal of durable writes."""

from __future__ import annotations

import os
import threading
import zlib
from dataclasses import dataclass, field, replace
from types import TracebackType

from shardconv_runtime.checkpoint.copying import CopyUnit, PlacedTensor, plan_units, run
from shardconv_runtime.checkpoint.lazy_tensor import LazyLeaf
from shardconv_runtime.errors import ShardconvError

from ..reporting.progress import Progress
from .crc32 import Extent
from .workspace import HEADER, UnitKey, Workspace

SYNC_EVERY_S = 1.0
"""Seconds between syncs, after which writes are durable and journaled; a crash loses no more."""


def fill(workspace: Workspace, leaves: dict[LazyLeaf, int], *, memory: int, progress: Progress) -> None:
    """Write the missing bytes of the files whose owners the workspace has locked.

    Args:
        workspace: where to write.
        leaves: their numbers in the journals, the same for every part of the job: ``numbered`` of the global
            tensors, in an order that all parts have.
        memory: I/O buffer size in bytes.
        progress: where to report progress.

    Raises:
        SourceError: if a source file cannot be read.
        ShardconvError: if a file cannot be written, for example because the disk is full. Finished work is
            kept.
    """
    written = workspace.written()
    mine = workspace.mine()
    placed = (
        PlacedTensor(workspace.files[index].tensor(name), index, offset)
        for index in mine
        for name, offset in workspace.files[index].offsets.items()
    )
    units = []
    for unit in plan_units(placed, leaves, memory):
        # An earlier run may have finished some of the moves of a unit.
        moves = tuple(move for move in unit.moves if unit.key not in written.get(move.file, {}))
        if moves:
            units.append(replace(unit, moves=moves))
    total = sum(workspace.files[index].num_bytes for index in mine)
    done = sum(extent.num_bytes for log in written.values() for unit in log.values() for extent in unit)
    # The disk needs room for the unallocated parts of the files, as far as can be told.
    num_bytes = 0
    for index in workspace.mine():
        path, size = workspace.location(index), workspace.files[index].num_bytes
        num_bytes += max(size - path.stat().st_blocks * 512, 0) if path.exists() else size
    stats = os.statvfs(workspace.path)
    free = stats.f_bavail * stats.f_frsize
    if num_bytes > free:
        needed, left = (f"{amount / 1e9:,.2f} GB" for amount in (num_bytes, free))
        raise ShardconvError(
            f"OUT {workspace.out} needs {needed} more, and its disk has {left} free; "
            "free some space, or name a directory on another disk"
        )
    try:
        with progress.bar("writing", total, done) as advance, _Target(workspace) as target:
            for index in mine:
                if HEADER not in written.get(index, {}):
                    advance(target.begin(index))

            def finished(unit: CopyUnit, sink: _Sink) -> None:
                target.journal(unit.key, sink.extents)
                advance(sum(extent.num_bytes for extents in sink.extents.values() for extent in extents))

            run(units, lambda: _Sink(target), finished)
    except OSError as error:
        raise ShardconvError(
            f"OUT {workspace.out} cannot be written: {error.strerror or error}; correct that and run the "
            "same command again, which continues"
        ) from error


class _Target:
    """The open files of a workspace, and the writes to them that are not journaled yet."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()
        self._pending: list[tuple[UnitKey, dict[int, list[Extent]]]] = []
        self._stop = threading.Event()
        self._error: OSError | None = None
        self._syncing = threading.Thread(target=self._sync_often, name="sync", daemon=True)

    def __enter__(self) -> _Target:
        self._syncing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._syncing.join()
        try:
            if self._error is None:
                self._sync()
            elif error is None:
                raise self._error
        except OSError:
            if error is None:  # otherwise it would hide the error that ended the writing
                raise
        finally:
            for handle in self._handles.values():
                os.close(handle)

    def begin(self, index: int) -> int:
        """Create a file of its final size and write its header.

        Returns:
            Bytes of the header.
        """
        file = self._workspace.files[index]
        handle = self._handle(index)
        os.ftruncate(handle, 0)
        os.ftruncate(handle, file.num_bytes)
        self.write(index, 0, memoryview(file.header))
        self.journal(HEADER, {index: [Extent(0, len(file.header), zlib.crc32(file.header))]})
        return len(file.header)

    def write(self, index: int, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of a file."""
        handle = self._handle(index)
        while len(data):
            count = os.pwrite(handle, data, offset)
            data, offset = data[count:], offset + count

    def journal(self, key: UnitKey, extents: dict[int, list[Extent]]) -> None:
        """Journal the extents that a unit wrote, as soon as they are durable."""
        with self._lock:
            self._pending.append((key, extents))
        if self._error is not None:
            raise self._error

    def _handle(self, index: int) -> int:
        with self._lock:
            if index not in self._handles:
                path = self._workspace.location(index)
                path.parent.mkdir(parents=True, exist_ok=True)
                self._handles[index] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            return self._handles[index]

    def _sync_often(self) -> None:
        while not self._stop.wait(SYNC_EVERY_S):
            try:
                self._sync()
            except OSError as error:
                self._error = error
                return

    def _sync(self) -> None:
        """Make pending writes durable and then journal them."""
        with self._lock:
            pending, self._pending = self._pending, []
            handles = dict(self._handles)
        for index in {index for _, extents in pending for index in extents}:
            os.fdatasync(handles[index])
        for key, extents in pending:
            for index, found in extents.items():
                self._workspace.append(index, key, found)
        if pending:
            self._workspace.sync()


@dataclass
class _Sink:
    """A writer for the bytes of one unit, which keeps their extents."""

    target: _Target
    extents: dict[int, list[Extent]] = field(default_factory=dict)

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of a file."""
        self.target.write(file, offset, data)
        extents = self.extents.setdefault(file, [])
        if extents and sum(extents[-1][:2]) == offset:
            last = extents[-1]
            crc = zlib.crc32(data, last.crc32)
            extents[-1] = Extent(last.offset, last.num_bytes + len(data), crc)
        else:
            extents.append(Extent(offset, len(data), zlib.crc32(data)))
