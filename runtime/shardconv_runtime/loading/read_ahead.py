"""Brings files into the page cache while the processor is busy with something else.

Loading a model goes on with seconds of imports after the files were checked, and the disk is idle meanwhile.
Plain reads are used, not ``posix_fadvise(WILLNEED)``: the kernel shortens each of those requests to the
disk's readahead, starts them all at once, and file systems on networks may ignore them.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

NUM_THREADS = 2
"""One keeps a local disk busy, but for the times at which it waits for its turn to run Python."""

PIECE_BYTES = 8 << 20
"""Read in one call, without the interpreter's lock: smaller pieces wait for it too often during imports."""

Span = tuple[Path, int, int]
"""A file, and bytes of it: the first one, and the one after the last."""

MEMORY_SHARE = 0.5
"""The most that is read, of the memory that is available to each process of this machine."""


class ReadAhead:
    """Threads that read bytes of files in their order, from now until ``stop`` or the end.

    Nothing is raised: the reader of the files will meet the same error. No more is read than MEMORY_SHARE of
    the machine's available memory, divided by the LOCAL_WORLD_SIZE of the launcher, and nothing where the
    system does not tell how much is available.

    Args:
        spans: what will be used, in that order.
        budget_bytes: the most to read, instead of that.
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
        """Stop after an error; else go on, since mapped files are still to be used."""
        if kind is not None:
            self.stop()

    def stop(self) -> None:
        """End the threads; takes as long as reading a piece, at most."""
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
    """Whether a piece seems to be in the page cache already, by three of its bytes."""
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
