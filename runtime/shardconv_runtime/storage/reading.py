"""Read a rank's tensors from the byte ranges of its files, whose headers were read before.

For the CPU they are views of a private mapping of each file: nothing is copied or even read until it is
used, and the page cache is the memory of all processes that load the same files. For a GPU they go through
pinned buffers (``staged_reading``).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..format.header import TORCH_NAME, ShardFile, StoredTensor
from ..format.slices import Rows
from .windows import tensor_at, tensor_within

# Read-ahead brings files into the page cache while the processor is busy with something else.
#
# Loading a model goes on with seconds of imports after the files were checked, and the disk is idle
# meanwhile. Plain reads are used, not ``posix_fadvise(WILLNEED)``: the kernel shortens each of those
# requests to the disk's readahead, starts them all at once, and file systems on networks may ignore them.

NUM_THREADS = 2
"""One thread keeps a local disk busy, except while it waits for its turn to run Python."""

PIECE_BYTES = 8 << 20
"""Bytes of one read, which releases the GIL: smaller reads wait for it too often during imports."""

Span = tuple[Path, int, int]
"""A file, its first byte to read, and the byte after the last one."""

MEMORY_SHARE = 0.5
"""Largest part that is read of the memory available to each process of this machine."""


class ReadAhead:
    """Threads that read byte ranges of files in order, until ``stop`` or the end.

    Nothing is raised, since the reader of the files will get the same error. At most MEMORY_SHARE of the
    machine's available memory is read, divided by the LOCAL_WORLD_SIZE of the launcher, and nothing if the
    system does not tell how much is available.
    """

    def __init__(self, spans: Sequence[Span], budget_bytes: int | None = None) -> None:
        budget = _budget_bytes() if budget_bytes is None else budget_bytes
        self._pieces = deque(_pieces(spans, budget))
        count = min(NUM_THREADS, len(self._pieces)) if hasattr(os, "preadv") else 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop after an error. Otherwise go on, since mapped files are still to be used."""
        if kind is not None:
            self.stop()

    def stop(self) -> None:
        """End the threads, which takes at most as long as reading one piece."""
        self._pieces.clear()
        self.wait()

    def wait(self) -> None:
        """Return once the threads have ended."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        # a bytearray would be zeroed under the interpreter's lock
        scratch = memoryview(mmap.mmap(-1, PIECE_BYTES))
        while self._pieces:
            try:
                path, begin, end = self._pieces.popleft()
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (IndexError, OSError):  # the other thread took the last one; the file is gone
                continue
            try:
                if not _is_cached(descriptor, begin, end):
                    os.preadv(descriptor, [scratch[: end - begin]], begin)
            except OSError:
                return
            finally:
                os.close(descriptor)


def _pieces(spans: Sequence[Span], budget: int) -> Iterator[Span]:
    for path, first, last in spans:
        for begin in range(first, last, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, last)
            budget -= end - begin
            if budget < 0:
                return
            yield path, begin, end


def _is_cached(descriptor: int, begin: int, end: int) -> bool:
    """Return whether a piece seems to be in the page cache already, by looking at three of its bytes."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    samples = (begin, (begin + end) // 2, end - 1)
    try:
        for at in samples:
            os.preadv(descriptor, [byte], at, os.RWF_NOWAIT)
    except OSError:  # EAGAIN: it is not; others: this file system cannot tell
        return False
    return True


def _budget_bytes() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].removesuffix("kB")) * 1024
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except (OSError, KeyError, ValueError):
        return 0
    return int(available * MEMORY_SHARE) // max(1, processes)


def with_rows(shards: Sequence[ShardFile], rows: Rows) -> list[ShardFile]:
    """Return the files with only the positions in ``rows`` of the first dim of the tensors that it names.

    The first dim of a stored tensor is its outermost one, so consecutive rows are consecutive bytes.
    """
    windows = []
    for shard in shards:
        tensors = dict(shard.tensors)
        for name, tensor in shard.tensors.items():
            if name in rows:
                (start, stop), (begin, end) = rows[name], tensor.offsets
                row_bytes = (end - begin) // tensor.shape[0] if tensor.shape[0] else 0
                offsets = begin + start * row_bytes, begin + stop * row_bytes
                tensors[name] = StoredTensor(tensor.dtype, (stop - start, *tensor.shape[1:]), offsets)
        last = next(reversed(tensors.values()), None)
        windows.append(ShardFile(shard.path, shard.start + (last.offsets[1] if last else 0), tensors))
    return windows


REMEDY = "copy the directory again, or convert the model again"

Adjacent = Sequence[tuple[str, ...]]
"""Names of tensors that share memory if they are next to each other in a file, in this order."""


@dataclass(frozen=True, slots=True)
class FileSpan:
    """One tensor, or several of one dtype that are next to each other in a file and share memory."""

    tensors: tuple[tuple[str, StoredTensor], ...]

    @property
    def begin(self) -> int:
        """Return the first byte, counted from the first one of all tensors of the file."""
        return self.tensors[0][1].offsets[0]

    @property
    def end(self) -> int:
        """Return the byte after the last one, counted in the same way."""
        return self.tensors[-1][1].offsets[1]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors; there are no gaps between them."""
        return self.end - self.begin

    def at(self, storage: torch.UntypedStorage, begin: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, of stored shapes and dtypes, whose bytes begin at ``begin`` of a storage.

        They share one storage, but autograd does not treat them as views of each other.
        """
        dtype = getattr(torch, TORCH_NAME[self.tensors[0][1].dtype])
        memory = tensor_at(storage, begin, self.num_bytes, dtype, (self.num_bytes // dtype.itemsize,))
        for name, stored in self.tensors:
            offset = (stored.offsets[0] - self.begin) // dtype.itemsize
            yield name, tensor_within(memory.untyped_storage(), offset, stored.shape, dtype)


def stretches(shard: ShardFile, adjacent: Adjacent = ()) -> Iterator[FileSpan]:
    """Yield the tensors of a file in its order."""
    first = {names[0]: names for names in adjacent}
    todo = list(shard.tensors.items())
    at = 0
    while at < len(todo):
        names = first.get(todo[at][0], ())
        stretch = todo[at : at + len(names)]
        are_next = tuple(name for name, _ in stretch) == names and len({s.dtype for _, s in stretch}) == 1
        taken = tuple(stretch) if are_next else (todo[at],)
        yield FileSpan(taken)
        at += len(taken)


def mapped(shards: Sequence[ShardFile], adjacent: Adjacent = ()) -> Generator[tuple[str, Tensor]]:
    """Yield local tensors of stored shapes in private, writable mappings; writes do not change the files."""
    for shard in shards:
        try:
            storage = map_file(shard.path, shard.num_bytes)
        except OSError as error:
            raise CheckpointError(
                f"{shard.path}: cannot be mapped into memory ({error}); {REMEDY}"
            ) from error
        for stretch in stretches(shard, adjacent):
            yield from stretch.at(storage, shard.start + stretch.begin)


def map_file(path: Path, num_bytes: int) -> Any:
    """Return the storage of a private, writable mapping of a file."""
    try:
        return torch.UntypedStorage.from_file(str(path), False, num_bytes)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error
