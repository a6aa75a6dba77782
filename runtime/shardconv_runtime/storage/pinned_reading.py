"""Tensors of files to a GPU, through pinned memory.

Threads read into a ring of pinned buffers, from which the bytes go to the device on their own stream:

    files ── preadv, several threads ──> ring of pinned buffers ── one copy each ──> slabs on the device

A slab is one allocation on the device, for one large tensor or for many small ones. Its tensors have
their own storages all the same, so that a write to one does not look like a write to the others; those
that a plan fuses share one, and count as one tensor here.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError, DamagedError
from ..format.header import ShardFile
from .file_access import WeightFile, is_local
from .reading import REMEDY, Adjacent, FileSpan, stretches

if TYPE_CHECKING:  # it imports the client of the Hub
    from .remote_files import RemoteFile

BUFFER_BYTES = 16 << 20
"""Bytes of each staging buffer: the copy to the device takes about a millisecond, much longer than its start,
and the bytes that were just read are partly still in the processor's cache."""

NUM_BUFFERS = 4
"""Buffers, and threads that fill them. One thread copies from the page cache at a few GB/s, and a bus
transfers about 25 GB/s. Eight ranks of a machine pin half a GiB, and its cores can run as many threads."""

ALIGNMENT = 256
"""Alignment of each tensor on the device in bytes, as if it had been allocated separately."""

_MAX_SPANS = 1024
"""Most spans that one call of preadv fills (IOV_MAX of Linux)."""


class DeviceEvent(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> Any:
        """Return once the device has reached it."""


class StagingDevice(Protocol):
    """The device of a staged load, with its streams and pinned memory."""

    def enter_thread(self) -> None:
        """Begin a thread that waits for events of the device."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Return host memory, uint8 ``[num_bytes]``, from which the device copies fast."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return device memory, uint8 ``[num_bytes]``, that ``copy`` may write to."""

    def copy(self, target: Tensor, source: Tensor) -> DeviceEvent:
        """Begin to copy a buffer, both uint8 ``[n]``; until the event, the buffer must not change."""

    def publish(self, event: DeviceEvent) -> None:
        """Order all work that the caller starts on the device from now on after the event."""

    def finish(self) -> None:
        """Return once all copies are done."""


class Cuda:
    """A GPU, with a stream for the copies.

    Memory belongs to the caller's stream, on which it may have been in use a moment ago. The copies wait for
    the work that was started there, and ``publish`` has the caller's stream wait for the copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        torch.cuda.set_device(
            self._device
        )  # otherwise the first call of a thread makes a context on the first GPU

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, num_bytes: int) -> Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return memory

    def copy(self, target: Tensor, source: Tensor) -> DeviceEvent:
        # blocking: a thread that waits leaves its core to others
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event.record(self._stream)
        return event

    def publish(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        self._stream.synchronize()


class _Span(NamedTuple):
    """A stretch of a buffer."""

    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Fill:
    """The contents of one buffer: consecutive bytes of a file, which go to spans of the buffer."""

    path: WeightFile
    file_begin: int
    spans: tuple[_Span, ...]
    slab_begin: int
    """The offset of the buffer's bytes in the slab."""

    @property
    def num_bytes(self) -> int:
        return self.spans[-1].begin + self.spans[-1].num_bytes


@dataclass(frozen=True, slots=True)
class _Slab:
    """One allocation on the device, the tensors in it and where they begin, and how it is filled."""

    num_bytes: int
    tensors: tuple[tuple[FileSpan, int], ...]
    fills: tuple[_Fill, ...]


def staged(
    shards: Sequence[ShardFile],
    device: StagingDevice,
    adjacent: Adjacent = (),
    *,
    buffer_bytes: int = BUFFER_BYTES,
    num_buffers: int = NUM_BUFFERS,
) -> Generator[tuple[str, Tensor]]:
    """Yield local tensors of stored shapes, in memory of ``device``, read by ``num_buffers`` threads and
    buffers.

    At the peak, the host's memory holds the buffers, and the device's memory holds the tensors.
    """
    slabs = [slab for shard in shards for slab in _slabs(shard, adjacent, buffer_bytes)]
    fills = deque(fill for slab in slabs for fill in slab.fills)
    size = max((fill.num_bytes for fill in fills), default=0)
    with ExitStack() as stack:
        files = {shard.path: stack.enter_context(_readable(shard.path)) for shard in shards}
        pool = ThreadPoolExecutor(num_buffers, "shardconv-read", device.enter_thread)
        stack.callback(device.finish)  # undone last first: no thread waits for an event of a lost copy
        stack.callback(pool.shutdown, cancel_futures=True)
        reads: deque[Future[Tensor]] = deque()

        def read_next(buffer: Tensor, free: DeviceEvent | None) -> None:
            if fills:
                fill = fills.popleft()
                reads.append(pool.submit(files[fill.path].read, fill, buffer, free))

        for _ in range(min(num_buffers, len(fills))):
            read_next(device.buffer(size), None)
        for slab in slabs:
            memory = device.allocate(slab.num_bytes)
            for fill in slab.fills:
                buffer = reads.popleft().result()
                target = memory[fill.slab_begin : fill.slab_begin + fill.num_bytes]
                copied = device.copy(target, buffer[: fill.num_bytes])
                read_next(buffer, copied)
            if slab.fills:
                device.publish(copied)
            for stretch, begin in slab.tensors:
                yield from stretch.at(memory.untyped_storage(), begin)


def _readable(path: WeightFile) -> _Readable:
    return _Readable(path) if is_local(path) else _Remote(path)


class _Readable:
    """A file that threads read from."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> _Readable:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedError(f"{self._path}: cannot be read ({error.strerror})") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, fill: _Fill, buffer: Tensor, free: DeviceEvent | None) -> Tensor:
        """Fill a buffer, uint8 ``[n]``, once it is free, and return it."""
        if free is not None:
            free.synchronize()
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]  # an array is a buffer
        todo, at = [view[begin : begin + size] for begin, size in fill.spans], fill.file_begin
        while todo:
            try:
                num_bytes = os.preadv(self._descriptor, todo[:_MAX_SPANS], at)
            except OSError as error:
                raise DamagedError(
                    f"{self._path}: cannot be read at byte {at} ({error.strerror}); {REMEDY}"
                ) from error
            if num_bytes == 0:
                raise CheckpointError(f"{self._path}: ends at byte {at}, and was longer before; {REMEDY}")
            todo, at = _after(todo, num_bytes), at + num_bytes
        return buffer


class _Remote(_Readable):
    """A file that threads read from over a network."""

    def __init__(self, file: RemoteFile) -> None:
        self._reader = file.reader()

    def __enter__(self) -> _Remote:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, fill: _Fill, buffer: Tensor, free: DeviceEvent | None) -> Tensor:
        """Fill a buffer, uint8 ``[n]``, once it is free, and return it."""
        if free is not None:
            free.synchronize()
        view, at = memoryview(buffer.numpy()), fill.file_begin  # type: ignore[arg-type]  # it is a buffer
        for begin, size in fill.spans:
            self._reader.read_into(at, view[begin : begin + size])
            at += size
        return buffer


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the views without their first bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


def _slabs(shard: ShardFile, adjacent: Adjacent, limit: int) -> Iterator[_Slab]:
    """Yield the tensors of a file in its order, as many in a slab as fit into a buffer of ``limit`` bytes.

    The tensors of a slab lie next to each other in the file.
    """
    slab: list[tuple[FileSpan, int]] = []
    end = 0
    for stretch in stretches(shard, adjacent):
        begin = math.ceil(end / ALIGNMENT) * ALIGNMENT
        if slab and (begin + stretch.num_bytes > limit or stretch.begin != slab[-1][0].end):
            yield _slab(shard, slab, limit)
            slab, begin = [], 0
        slab.append((stretch, begin))
        end = begin + stretch.num_bytes
    if slab:
        yield _slab(shard, slab, limit)


def _slab(shard: ShardFile, held: list[tuple[FileSpan, int]], limit: int) -> _Slab:
    spans = tuple(_Span(begin, stretch.num_bytes) for stretch, begin in held if stretch.num_bytes)
    first = shard.start + held[0][0].begin
    if not spans:
        return _Slab(0, tuple(held), ())
    end = spans[-1].begin + spans[-1].num_bytes
    if end <= limit:
        fills = [_Fill(shard.path, first, spans, 0)]
    else:  # a single stretch that is larger than a buffer
        parts = ((at, min(limit, end - at)) for at in range(0, end, limit))
        fills = [_Fill(shard.path, first + at, (_Span(0, size),), at) for at, size in parts]
    return _Slab(end, tuple(held), tuple(fills))
