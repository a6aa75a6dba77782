"""A file in an object store as a stream, which the client of the Hub sends without a copy on this machine."""

from __future__ import annotations

import io
import os
from typing import Any

from shardconv_runtime.files.remote_files import RemoteFile

BUFFER_BYTES = 8 << 20
"""Bytes of one request."""


class RemoteBytes(io.RawIOBase):
    """The bytes of a remote file, read by ranges; to be buffered."""

    def __init__(self, file: RemoteFile) -> None:
        self._reader, self._num_bytes, self._position = file.reader(), file.num_bytes, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to a byte, and return its number."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read the next bytes, and return their number: 0 at the end."""
        into = memoryview(buffer).cast("B")[: max(0, self._num_bytes - self._position)]
        self._reader.read_into(self._position, into)
        self._position += len(into)
        return len(into)
