"""Files that are sent to an object store while they are made, part by part in order.

Parts may be filled in any order, and are sent in the order of the file, one thread for each file. A worker
that has filled a part waits while too many complete ones are to be sent. It never waits for parts that others
still fill, so each can go on.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from shardconv_runtime.files.checksums import PIECE_BYTES, of_pieces
from shardconv_runtime.files.shard_files import sampled_blocks

from .job import TargetFile
from .store_objects import MOST_PARTS, PART_BYTES, StoreDirectory

MOST_WAITING = 2
"""Complete parts of a file, to be sent next, with which its workers wait."""

NUM_REQUESTS = 16
"""Concurrent requests of all files that are written together."""

SUFFIX = ".safetensors"
"""The end of the names of shards."""

END_S = 10.0
"""Seconds in which requests are aborted at an interruption."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Checksums of a file that was sent."""

    checksum: str
    """Of the kind that its entry in the manifest has."""
    sample: str
    e_tag: str


class Stopped(Exception):
    """The run ends with the error of another thread."""


@dataclass(eq=False)
class _Stream:
    """A file that is being sent."""

    num_bytes: int
    part_bytes: int
    condition: threading.Condition = field(default_factory=threading.Condition)
    parts: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    """Bytes of each part in ``parts`` that are not there yet."""
    next: int = 0
    """The part to send next."""
    error: BaseException | None = None
    thread: threading.Thread | None = None

    def put(self, offset: int, data: memoryview) -> None:
        """Take bytes, and wait if parts are filled faster than they are sent."""
        has_filled = False
        while len(data):
            index, start = divmod(offset, self.part_bytes)
            with self.condition:
                if index not in self.parts:
                    size = min(self.part_bytes, self.num_bytes - index * self.part_bytes)
                    self.parts[index] = np.empty(size, np.uint8)
                    self.missing[index] = size
                part = self.parts[index]
            count = min(len(data), len(part) - start)
            part[start : start + count] = data[:count]
            data, offset = data[count:], offset + count
            with self.condition:
                self.missing[index] -= count
                if self.missing[index] == 0:
                    has_filled = True
                    self.condition.notify_all()
        if has_filled:
            with self.condition:
                self.condition.wait_for(lambda: self.error is not None or self._num_ready() <= MOST_WAITING)
        if self.error is not None:
            raise self.error

    def chunks(self, hashes: _Hashes) -> Iterator[memoryview]:
        """Yield the parts in order, each as soon as it is complete."""
        for index in range(-(-self.num_bytes // self.part_bytes)):
            with self.condition:
                self.condition.wait_for(lambda: self.error is not None or self._num_ready() > 0)
                if self.error is not None:
                    raise Stopped
                part = self.parts.pop(index)
                del self.missing[index]
                self.next = index + 1
                self.condition.notify_all()
            hashes.update(part.data)
            yield part.data

    def stop(self, error: BaseException) -> None:
        """End it, with the first error."""
        with self.condition:
            self.error = self.error or error
            self.condition.notify_all()

    def _num_ready(self) -> int:
        count = 0
        while self.missing.get(self.next + count) == 0:
            count += 1
        return count


class StreamedFiles:
    """The files of a run that are sent, by several threads."""

    def __init__(
        self,
        files: Mapping[int, TargetFile],
        store: StoreDirectory,
        finish: Callable[[int, Digests], object],
    ) -> None:
        """Prepare to send.

        Args:
            files: the files by their numbers.
            store: where to.
            finish: is called when a file is complete.
        """
        self._files, self._store, self._finish = files, store, finish
        self._num_requests = max(2, NUM_REQUESTS // max(1, len({file.owner for file in files.values()})))
        self._streams: dict[int, _Stream] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> StreamedFiles:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams.values():
            stream.stop(Stopped())
        for stream in self._streams.values():
            assert stream.thread is not None
            stream.thread.join(END_S)

    def open(self, index: int) -> None:
        """Begin a file with its header."""
        self._stream(index)

    def put(self, index: int, offset: int, data: memoryview) -> None:
        """Take bytes at an offset of a file."""
        self._stream(index).put(offset, data)

    def finish(self) -> None:
        """Wait until all files are sent."""
        for stream in self._streams.values():
            assert stream.thread is not None
            stream.thread.join()
            if stream.error is not None:
                raise stream.error

    def _stream(self, index: int) -> _Stream:
        with self._lock:
            stream = self._streams.get(index)
            if stream is not None:
                return stream
            num_bytes = self._files[index].num_bytes
            stream = self._streams[index] = _Stream(num_bytes, max(PART_BYTES, -(-num_bytes // MOST_PARTS)))
            stream.thread = threading.Thread(
                target=self._run, args=(index, stream), name="shardconv-send", daemon=True
            )
            stream.thread.start()
        stream.put(0, memoryview(self._files[index].header))
        return stream

    def _run(self, index: int, stream: _Stream) -> None:
        file = self._files[index]
        hashes = _Hashes(file.num_bytes, with_sha256=not file.path.endswith(SUFFIX))
        try:
            e_tag = self._store.stream(
                file.path, stream.chunks(hashes), stream.part_bytes, self._num_requests
            )
            self._finish(index, hashes.digests(e_tag))
        except BaseException as error:
            stream.stop(error)


class _Hashes:
    """The checksums of a file whose bytes come in order."""

    def __init__(self, num_bytes: int, *, with_sha256: bool) -> None:
        self._blocks = list(sampled_blocks(num_bytes))
        self._pieces: list[int] = []
        self._sampled = self._offset = 0
        self._sha256 = hashlib.sha256() if with_sha256 else None  # it would take more time than all else

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        begin, end = self._offset, self._offset + len(data)
        at = begin
        while at < end:
            stop = min(end, (at // PIECE_BYTES + 1) * PIECE_BYTES)
            if at % PIECE_BYTES == 0:
                self._pieces.append(0)
            self._pieces[-1] = zlib.crc32(data[at - begin : stop - begin], self._pieces[-1])
            at = stop
        for low, high in self._blocks:
            if low < end and high > begin:
                self._sampled = zlib.crc32(
                    data[max(low, begin) - begin : min(high, end) - begin], self._sampled
                )
        if self._sha256 is not None:
            self._sha256.update(data)
        self._offset = end

    def digests(self, e_tag: str) -> Digests:
        """Return all of them."""
        checksum = of_pieces(self._pieces) if self._sha256 is None else f"sha256:{self._sha256.hexdigest()}"
        return Digests(checksum, f"crc32:{self._sampled:08x}", e_tag)
