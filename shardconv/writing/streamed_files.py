"""Files that are sent to an object store while they are made, part by part in order.

Parts may be filled in any order, and are sent in the order of the file, one thread for each file. A unit of
copying begins when there is memory for the parts that it fills. A unit that has begun never waits.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from shardconv_runtime.checkpoint.copying import UNIT_BYTES
from shardconv_runtime.files.checksums import PIECE_BYTES, of_pieces
from shardconv_runtime.files.shard_files import sampled_blocks

from .job import TargetFile
from .store_objects import MOST_PARTS, PART_BYTES

NUM_REQUESTS = 16
"""Concurrent requests of all files that are written together."""

SUFFIX = ".safetensors"
"""The end of the names of shards."""

_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 20

END_S = 10.0
"""Seconds in which requests are aborted at an interruption."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Checksums of a file that was sent."""

    checksum: str
    """The same kind as in the file's entry in the manifest."""
    sample: str
    e_tag: str


class Stopped(Exception):
    """The run ends with the error of another thread."""


@dataclass(eq=False)
class _Stream:
    """A file that is being sent."""

    num_bytes: int
    part_bytes: int
    parts: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    """Bytes of each part in ``parts`` that are not there yet."""
    next: int = 0
    """The part to send next."""

    @property
    def is_ready(self) -> bool:
        """Whether the next part is complete."""
        return self.missing.get(self.next) == 0


class TakesParts(Protocol):
    """Takes the parts of files in order, as ``StoreDirectory`` does, which sends them."""

    def stream(self, name: str, parts: Iterator[memoryview], part_bytes: int, num_requests: int) -> str:
        """Take the parts of a file, each of ``part_bytes`` but for the last one, and return its mark."""


class StreamedFiles:
    """The files of a run that are sent, by several threads."""

    def __init__(
        self,
        files: Mapping[int, TargetFile],
        store: TakesParts,
        memory: int,
        finish: Callable[[int, Digests], object],
    ) -> None:
        """Prepare to send.

        Args:
            files: the files by their numbers.
            store: where to.
            memory: bytes of parts that are kept until they are sent.
            finish: is called when a file is complete.
        """
        self._files, self._store, self._memory, self._finish = files, store, memory, finish
        self._num_requests = max(2, NUM_REQUESTS // max(1, len({file.owner for file in files.values()})))
        self._streams: dict[int, _Stream] = {}
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._tickets = itertools.count()
        self._num_begun = self._num_units = 0
        self._held_bytes = 0
        """Bytes of the parts in memory."""
        self._expected_bytes = 0
        """Bytes that units still have to put, as if each had a full unit."""
        self._error: BaseException | None = None

    def __enter__(self) -> StreamedFiles:
        _return_large_blocks()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(END_S)

    def begin_unit(self) -> None:
        """Wait until there is memory for the bytes of another unit, and units that came before have begun.

        They are in the order of the files, so the first of them has the bytes that the next part lacks.
        """
        with self._changed:
            ticket = next(self._tickets)
            self._changed.wait_for(lambda: ticket == self._num_begun and self._may_begin())
            self._num_begun += 1
            self._num_units += 1
            self._expected_bytes += UNIT_BYTES
            self._changed.notify_all()

    def end_unit(self, num_bytes: int) -> None:
        """Note that all bytes of a unit have been put."""
        with self._changed:
            self._num_units -= 1
            self._expected_bytes -= UNIT_BYTES - num_bytes
            self._changed.notify_all()

    def open(self, index: int) -> None:
        """Begin a file with its header."""
        self._stream(index)

    def put(self, index: int, offset: int, data: memoryview) -> None:
        """Take bytes at an offset of a file."""
        stream = self._stream(index)
        while len(data):
            number, start = divmod(offset, stream.part_bytes)
            with self._changed:
                if self._error is not None:
                    raise self._error
                part = stream.parts.get(number)
                if part is None:
                    size = min(stream.part_bytes, stream.num_bytes - number * stream.part_bytes)
                    part = stream.parts[number] = np.empty(size, np.uint8)
                    stream.missing[number] = size
                    self._held_bytes += size
            count = min(len(data), len(part) - start)
            part[start : start + count] = data[:count]
            data, offset = data[count:], offset + count
            with self._changed:
                self._expected_bytes -= count
                stream.missing[number] -= count
                if stream.missing[number] == 0:
                    self._changed.notify_all()

    def finish(self) -> None:
        """Wait until all files are sent."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Abort the files that are not sent yet."""
        self._fail(Stopped())

    def _fail(self, error: BaseException) -> None:
        """End all threads, with the first error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _may_begin(self) -> bool:
        if self._error is not None or self._held_bytes + self._expected_bytes + UNIT_BYTES <= self._memory:
            return True
        # Parts that are kept will be sent, or completed by units that have begun. If there are none, their
        # bytes are in units to come, as in a transpose, whose first row has elements of all parts.
        return self._num_units == 0 and not any(stream.is_ready for stream in self._streams.values())

    def _stream(self, index: int) -> _Stream:
        with self._changed:
            stream = self._streams.get(index)
            if stream is not None:
                return stream
            num_bytes = self._files[index].num_bytes
            stream = self._streams[index] = _Stream(num_bytes, max(PART_BYTES, -(-num_bytes // MOST_PARTS)))
            thread = threading.Thread(
                target=self._run, args=(index, stream), name="shardconv-send", daemon=True
            )
            self._threads.append(thread)
        thread.start()
        header = memoryview(self._files[index].header)
        with self._changed:
            self._expected_bytes += len(header)
        self.put(index, 0, header)
        return stream

    def _run(self, index: int, stream: _Stream) -> None:
        file = self._files[index]
        hashes = _Hashes(file.num_bytes, with_sha256=not file.path.endswith(SUFFIX))
        try:
            e_tag = self._store.stream(
                file.path, self._parts(stream, hashes), stream.part_bytes, self._num_requests
            )
            self._finish(index, hashes.digests(e_tag))
        except BaseException as error:
            self._fail(error)

    def _parts(self, stream: _Stream, hashes: _Hashes) -> Iterator[memoryview]:
        """Yield the parts of a file in order, each as soon as it is complete."""
        for number in range(-(-stream.num_bytes // stream.part_bytes)):
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or stream.is_ready)
                if self._error is not None:
                    raise Stopped
                part = stream.parts.pop(number)
                del stream.missing[number]
                stream.next = number + 1
                self._held_bytes -= len(part)
                self._changed.notify_all()
            hashes.update(part.data)
            yield part.data


def _return_large_blocks() -> None:
    """Let glibc return large blocks to the system when they are freed, see mallopt(3).

    By default it begins to keep blocks of a size that was freed, in a heap for each thread. With parts that
    pass from thread to thread, the memory of a conversion of 10 GB grew from 0.7 to 1.4 GB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


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
