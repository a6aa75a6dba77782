"""Open files that lazy tensors are read from, local and on the Hub."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from ..errors import SourceError
from ..hub.remote_files import RemoteFile, RemoteReader
from .lazy_tensor import FileLeaf, item_bytes


class OpenSources:
    """Files, opened at their first read; thread-safe."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._readers: dict[RemoteFile, RemoteReader] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> OpenSources:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def read(self, leaf: FileLeaf, start: int, into: memoryview) -> None:
        """Fill ``into`` with elements of a leaf from ``start`` on.

        Raises:
            SourceError: the file cannot be read, or ends before.
        """
        offset = leaf.offset + start * item_bytes(leaf.dtype)
        if isinstance(leaf.path, RemoteFile):
            self._reader(leaf.path).read_into(offset, into)
            return
        while len(into):
            try:
                count = os.preadv(self._handle(leaf.path), [into], offset)
            except OSError as error:
                reason = error.strerror or str(error)
                raise SourceError(f"{leaf.path} cannot be read at byte {offset}: {reason}") from error
            if count == 0:
                raise SourceError(
                    f"{leaf.path} ends before byte {offset + 1}: it was cut off since its header was read; "
                    "download or copy it again"
                )
            into, offset = into[count:], offset + count

    def read_runs(self, leaf: FileLeaf, starts: Sequence[int], run: int, into: memoryview) -> None:
        """Fill ``into`` with runs of a local leaf, which may be many and short.

        Args:
            leaf: to read.
            starts: of the runs, in elements.
            run: length of each run in elements.
            into: filled with the runs in their order.

        Raises:
            SourceError: the file cannot be read, or ends before.
        """
        assert isinstance(leaf.path, Path), "remote leaves are not read run by run"
        size = item_bytes(leaf.dtype)
        handle, length, end = self._handle(leaf.path), run * size, 0
        for start in starts:
            part = into[end : end + length]
            try:
                count = os.preadv(handle, (part,), leaf.offset + start * size)
            except OSError:
                count = 0
            if count != length:
                self.read(leaf, start, part)  # raises the error
            end += length

    def _reader(self, file: RemoteFile) -> RemoteReader:
        with self._lock:
            return self._readers.setdefault(file, RemoteReader(file))

    def _handle(self, path: Path) -> int:
        with self._lock:
            if path not in self._handles:
                self._handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._handles[path]
