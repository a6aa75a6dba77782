"""Copies lazy tensors: reads each source byte once, in parallel, through buffers of fixed size.

The boxes of all tensors to write are grouped by the leaf that they read, and a leaf is divided into
**units**, stretches of its elements. A worker takes a unit, reads it band by band, and copies the elements of
each box in the band to their target: contiguous ones directly, strided ones through a second buffer. A column
slice for eight ranks therefore costs one pass over the source. Units are independent and may run in any
order; each hands its bytes to a **sink** that writes or compares them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from ..errors import DamagedModelError
from ..format.header import dtype_name, item_bytes
from ..storage.file_access import is_local
from ..storage.remote_files import RangeReader, RemoteFile
from .boxes import (
    BoxDim,
    Move,
    extent,
    is_run,
    move_of,
    packed_source,
    scatters,
    source_runs,
    source_stretches,
    target_runs,
    wanted,
    within,
)
from .lazy_tensor import ComputedLeaf, FileLeaf, LazyLeaf, LazyTensor

UNIT_BYTES = 1 << 25
"""Bytes of a leaf that one worker takes at a time."""

BAND_BYTES = 1 << 20
"""Bytes of one read, few enough to stay in a core's cache until they are written."""

MAX_WORKERS = 16

SPARSE = 4
"""Boxes are read run by run if that reads by this factor fewer bytes."""

PAGE_BYTES = 4096

READ_MEMORY = BAND_BYTES * MAX_WORKERS * 4
"""Bytes of the buffers through which tensors are read into memory."""

MAX_REQUESTS = 100_000
"""Most reads over a network; each takes some milliseconds with this many workers. If more stretches are
needed, the shortest gaps between them are read too; otherwise only the needed bytes are."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class CopyUnit:
    """A stretch of a leaf, and the boxes that reach into it."""

    leaf: LazyLeaf
    start: int
    stop: int
    moves: tuple[Move, ...]
    band: int
    """Elements of one read."""
    gap: int = 0
    """Most elements of a gap between stretches of a remote leaf that is read too."""


class PlacedTensor(NamedTuple):
    """A tensor and its position in a target file."""

    tensor: LazyTensor
    file: int
    offset: int
    """The offset in bytes."""


class Sink(Protocol):
    """Receives the bytes of one unit; each unit has its own sink."""

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Take the bytes of a file from ``offset`` on; ``data`` is overwritten after the call."""


S = TypeVar("S", bound=Sink)


def plan_units(placed: Iterable[PlacedTensor], memory: int) -> list[CopyUnit]:
    """Divide the copying into units, in the order of the source files, with a budget in bytes for the buffers
    of all workers."""
    by_leaf: dict[LazyLeaf, list[Move]] = {}
    for tensor, file, offset in placed:
        for piece in tensor.pieces:
            by_leaf.setdefault(piece.leaf, []).append(move_of(tensor, piece, file, offset))
    units: list[CopyUnit] = []
    gap_bytes = _gap_bytes(by_leaf)
    for leaf in sorted(by_leaf, key=_source_order):
        units += _leaf_units(leaf, by_leaf[leaf], memory, gap_bytes)
    return units


def is_remote(leaf: LazyLeaf) -> bool:
    """Return whether a leaf is read over a network."""
    return isinstance(leaf, FileLeaf) and not is_local(leaf.path)


def num_workers(remote: bool = False) -> int:
    """Return the number of concurrent units: one per core, more if they wait for a network."""
    return MAX_WORKERS if remote else max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0))))


def run(
    units: Sequence[CopyUnit],
    make_sink: Callable[[], S],
    done: Callable[[CopyUnit, S], object],
    failed: Callable[[], object] = lambda: None,
) -> None:
    """Copy all units.

    Args:
        make_sink: is called by a worker that begins a unit.
        done: is called when a unit is copied.
        failed: is called before the workers are waited for, if one of them failed.
    """
    stop = threading.Event()
    todo: Iterator[CopyUnit] = iter(units)
    running: dict[Future[S], CopyUnit] = {}
    threads = num_workers(any(is_remote(unit.leaf) for unit in units))
    with OpenSources() as sources, ThreadPoolExecutor(threads, "copy") as pool:
        workers = _Workers(sources, stop)
        try:
            while True:
                for unit in todo:
                    running[pool.submit(workers.copy, unit, make_sink)] = unit
                    if len(running) >= 2 * threads:
                        break
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    done(running.pop(future), future.result())
        except BaseException:
            stop.set()
            failed()
            raise


class _Stopped(Exception):
    """Another worker failed."""


class _Turns:
    """A lock that threads get in the order in which they ask for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_asked = self._num_done = 0

    def __enter__(self) -> None:
        with self._changed:
            turn = self._num_asked
            self._num_asked += 1
            self._changed.wait_for(lambda: turn == self._num_done)

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._num_done += 1
            self._changed.notify_all()


class _Workers:
    """The state that workers share."""

    def __init__(self, sources: OpenSources, stop: threading.Event) -> None:
        self._sources = sources
        self._stop = stop
        self._buffers = threading.local()
        self._computing = _Turns()

    def copy(self, unit: CopyUnit, make_sink: Callable[[], S]) -> S:
        """Copy one unit."""
        sink = make_sink()
        if isinstance(unit.leaf, ComputedLeaf):
            # Each holds a tensor in memory, so one at a time; in order, as some keep what the next one needs.
            with self._computing:
                tensor = unit.leaf.compute()
                computed_form = (dtype_name(tensor.dtype), tensor.numel())
                expected_form = unit.leaf.dtype, unit.leaf.num_elements
                assert computed_form == expected_form, f"{unit.leaf.name} was computed as {computed_form}"
                flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element: any stride
                data: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
                elements = data.view(_UNSIGNED[item_bytes(unit.leaf.dtype)])
                self._bands(unit, sink, lambda start, stop: elements[start:stop])
        elif is_remote(unit.leaf):
            self._fetch(unit, sink)
        elif isinstance(unit.leaf, FileLeaf) and (stretch := _sparse_stretch(unit)):
            self._gather(unit, unit.leaf, stretch, sink)
        else:
            self._bands(unit, sink, lambda start, stop: self._read(unit.leaf, start, stop))
        return sink

    def _bands(self, unit: CopyUnit, sink: Sink, read: Callable[[int, int], np.ndarray[Any, Any]]) -> None:
        for boxes in self._clipped(unit, unit.band):
            low = min(box.source for box in boxes)
            band = read(low, max(box.end for box in boxes))
            for box in boxes:
                self._put(box, unit.leaf.dtype, band, low, sink)

    def _gather(self, unit: CopyUnit, leaf: FileLeaf, stretch: int, sink: Sink) -> None:
        """Read each box run by run, if most elements between the runs are not needed."""
        size = item_bytes(leaf.dtype)
        for boxes in self._clipped(unit, stretch):
            for box in boxes:
                buffer = self._buffer("read", box.num_elements * size)
                run, starts = source_runs(box.dims)
                self._sources.read_runs(leaf, [box.source + start for start in starts], run, buffer.data)
                self._put(packed_source(box), leaf.dtype, buffer.view(_UNSIGNED[size]), 0, sink)

    def _fetch(self, unit: CopyUnit, sink: Sink) -> None:
        """Read the stretches of the boxes over a network, with gaps that cost less than a request."""
        assert isinstance(unit.leaf, FileLeaf)
        size = item_bytes(unit.leaf.dtype)
        for boxes in self._clipped(unit, unit.band):
            low = min(box.source for box in boxes)
            buffer = self._buffer("read", (max(box.end for box in boxes) - low) * size)
            for start, stop in wanted(boxes, unit.gap):
                self._sources.read(unit.leaf, start, buffer[(start - low) * size : (stop - low) * size].data)
            for box in boxes:
                self._put(box, unit.leaf.dtype, buffer.view(_UNSIGNED[size]), low, sink)

    def _clipped(self, unit: CopyUnit, stretch: int) -> Iterator[list[Move]]:
        """Yield the boxes of a unit, clipped to ``stretch`` elements of the leaf at a time."""
        for low in range(unit.start, unit.stop, stretch):
            if self._stop.is_set():
                raise _Stopped
            high = min(low + stretch, unit.stop)
            if boxes := [box for move in unit.moves for box in within(move, low, high)]:
                yield boxes

    def _read(self, leaf: LazyLeaf, start: int, stop: int) -> np.ndarray[Any, Any]:
        size = item_bytes(leaf.dtype)
        buffer = self._buffer("read", (stop - start) * size)
        if isinstance(leaf, FileLeaf):
            self._sources.read(leaf, start, buffer.data)
        else:
            buffer[:] = 0
        return buffer.view(_UNSIGNED[size])

    def _buffer(self, name: str, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        buffer: np.ndarray[Any, np.dtype[np.uint8]] | None = getattr(self._buffers, name, None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = np.empty(num_bytes, np.uint8)
            setattr(self._buffers, name, buffer)
        return buffer[:num_bytes]

    def _put(self, box: Move, dtype: str, band: np.ndarray[Any, Any], low: int, sink: Sink) -> None:
        """Hand the elements of a box to the sink; ``band`` holds all of them and begins at ``low``."""
        first = box.source - low
        if dtype == box.dtype and is_run(box.dims):
            sink.put(box.file, box.offset, band[first : first + extent(box.dims)].data.cast("B"))
            return
        dims = sorted(box.dims, key=lambda dim: -dim.target)
        packed = self._pack(dims, band[first:], dtype, box.dtype)
        run, starts = target_runs(dims)
        size = item_bytes(box.dtype)
        for index, start in enumerate(starts):
            part = packed[index * run * size : (index + 1) * run * size]
            sink.put(box.file, box.offset + start * size, part)

    def _pack(
        self, dims: Sequence[BoxDim], band: np.ndarray[Any, Any], dtype: str, wanted: str
    ) -> memoryview:
        """Return the elements of a box in the order of the target, cast."""
        shape = tuple(dim.size for dim in dims)
        strided = np.ndarray(
            shape, band.dtype, band, strides=tuple(dim.source * band.itemsize for dim in dims)
        )
        if dtype != wanted:
            values = torch.from_numpy(np.ascontiguousarray(strided)).view(getattr(torch, dtype))
            cast = values.to(getattr(torch, wanted)).reshape(-1).view(torch.uint8).numpy()
            return cast.data
        packed = self._buffer("pack", strided.nbytes)
        np.copyto(packed.view(band.dtype).reshape(shape), strided)
        return packed.data


def _leaf_units(leaf: LazyLeaf, moves: list[Move], memory: int, gap_bytes: int) -> Iterator[CopyUnit]:
    """Yield units at multiples of ``UNIT_BYTES`` from the start of a file's leaf; one for another leaf."""
    size = item_bytes(leaf.dtype)
    # Each worker has a buffer to read, one to pack, and as much again for casts.
    share = memory // num_workers(is_remote(leaf)) // 4
    band = max(1, min(BAND_BYTES, share) // size)
    if not isinstance(leaf, FileLeaf):
        yield CopyUnit(leaf, 0, leaf.num_elements, tuple(moves), band)
        return
    step = max(UNIT_BYTES // size, 1)
    if is_remote(leaf) or any(scatters(move) for move in moves):
        band = max(1, min(step, share // size))  # long bands give long stretches to write
    else:
        # Full rows of the strided boxes: at most `band` elements, or one row.
        row = max((dim.source for move in moves for dim in move.dims if dim.source <= band), default=1)
        band = max(band // row, 1) * row
    gap = 0 if is_local(leaf.path) else max(gap_bytes, leaf.path.gap_bytes)
    ordered = sorted(moves, key=lambda move: move.source)
    for start in range(0, leaf.num_elements, step):
        stop = min(start + step, leaf.num_elements)
        moves_of_unit = tuple(move for move in ordered if move.source < stop and move.end > start)
        if moves_of_unit:
            yield CopyUnit(leaf, start, stop, moves_of_unit, band, gap // size)


def _gap_bytes(moves: Mapping[LazyLeaf, Sequence[Move]]) -> int:
    """Return the largest gap that is read too, so that there are at most ``MAX_REQUESTS`` requests."""
    stretches: list[tuple[int, int]] = []
    for leaf, boxes in moves.items():
        if is_remote(leaf):
            for box in boxes:
                run, count, stride = source_stretches(box.dims)
                stretches.append(((stride - run) * item_bytes(leaf.dtype), count))
    requests = 0
    for gap, count in sorted(stretches, reverse=True):
        requests += count
        if requests > MAX_REQUESTS:
            return gap
    return 0


def _sparse_stretch(unit: CopyUnit) -> int:
    """Return the elements to clip to if few of a unit's elements are needed; 0 to read the full unit.

    Every run costs at least a page and a call.
    """
    boxes = [box for move in unit.moves for box in within(move, unit.start, unit.stop)]
    if not boxes:
        return 0
    size = item_bytes(unit.leaf.dtype)
    span = max(box.end for box in boxes) - min(box.source for box in boxes)
    num_needed = sum(box.num_elements for box in boxes)
    cost = sum(_gather_bytes(box, size) for box in boxes)
    return unit.band * (span // num_needed) if SPARSE * cost < span * size else 0


def _gather_bytes(box: Move, size: int) -> int:
    run, starts = source_runs(box.dims)
    return len(starts) * max(run * size, PAGE_BYTES)


def _source_order(leaf: LazyLeaf) -> tuple[int, str, int]:
    if isinstance(leaf, FileLeaf):
        return 0, str(leaf.path), leaf.offset
    return (1, leaf.name, 0) if isinstance(leaf, ComputedLeaf) else (2, "", 0)


def read_tensor(tensor: LazyTensor) -> torch.Tensor:
    """Read a tensor into memory; see ``read_tensors`` for its shape, dtype and errors."""
    return read_tensors([tensor])[0]


def read_tensors(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    """Read several tensors into memory, in one pass over their files.

    Returns:
        On the CPU, contiguous, of the shapes and dtypes of ``tensors``.
    """
    values = [torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for tensor in tensors]
    read_into(tensors, values)
    return values


def read_into(tensors: Sequence[LazyTensor], values: Sequence[torch.Tensor]) -> None:
    """Read several tensors into memory that is there, in one pass over their files.

    Args:
        values: where to: on the CPU, contiguous, of the shapes and dtypes of ``tensors``.
    """
    memory = [value.reshape(-1).view(torch.uint8).numpy() for value in values]
    placed = [PlacedTensor(tensor, index, 0) for index, tensor in enumerate(tensors)]
    run(plan_units(placed, READ_MEMORY), lambda: _Memory(memory), lambda unit, sink: None)


class _Memory:
    """A sink into memory; its files are tensors."""

    def __init__(self, memory: Sequence[np.ndarray[Any, np.dtype[np.uint8]]]) -> None:
        self._memory = memory

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Copy the bytes to a tensor."""
        self._memory[file][offset : offset + len(data)] = data


class OpenSources:
    """Files, opened at their first read; thread-safe."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._readers: dict[RemoteFile, RangeReader] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> OpenSources:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def read(self, leaf: FileLeaf, start: int, into: memoryview) -> None:
        """Fill ``into`` with elements of a leaf from ``start`` on."""
        offset = leaf.offset + start * item_bytes(leaf.dtype)
        if not is_local(leaf.path):
            self._reader(leaf.path).read_into(offset, into)
            return
        while len(into):
            try:
                count = os.preadv(self._handle(leaf.path), [into], offset)
            except OSError as error:
                reason = error.strerror or str(error)
                raise DamagedModelError(f"{leaf.path} cannot be read at byte {offset}: {reason}") from error
            if count == 0:
                raise DamagedModelError(
                    f"{leaf.path} ends before byte {offset + 1}: it was cut off since its header was read; "
                    "download or copy it again"
                )
            into, offset = into[count:], offset + count

    def read_runs(self, leaf: FileLeaf, starts: Sequence[int], run: int, into: memoryview) -> None:
        """Fill ``into`` with runs of a local leaf, which may be many and short."""
        assert is_local(leaf.path), "remote leaves are not read run by run"
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

    def _reader(self, file: RemoteFile) -> RangeReader:
        with self._lock:
            if file not in self._readers:
                self._readers[file] = file.reader()
            return self._readers[file]

    def _handle(self, path: Path) -> int:
        with self._lock:
            if path not in self._handles:
                self._handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._handles[path]
