"""A hint where a rank waits for others that do not come, long before its time limit.

A call that only some ranks make (a validation pass on rank 0 alone) leaves them waiting for the time limit of
their process group, which is minutes or hours. The hint says in which call a rank waits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

HINT_S = 60.0
"""Seconds of waiting after which a hint is given, or a quarter of the time limit if that is shorter."""

_LEAST_S = 5.0
"""Ranks are apart by seconds while one of them compiles or reads data, so that a hint would be noise."""

_log = logging.getLogger(__name__)


class _Watcher:
    """A thread of this process that looks at the waits of the others once a second."""

    def __init__(self) -> None:
        self._waits: dict[int, tuple[float, float, str]] = {}
        """Number of a wait -> when to give its hint, when it began, and its call."""
        self._lock = threading.Lock()
        self._number = 0
        self._process = 0
        """The process of the thread; a forked process has none."""

    def begin(self, what: str, hint_s: float) -> int:
        """Note that a wait begins; return its number."""
        now = time.monotonic()
        with self._lock:
            if self._process != os.getpid():
                self._process = os.getpid()
                self._waits.clear()
                threading.Thread(target=self._watch, name="shardconv-hints", daemon=True).start()
            self._number += 1
            self._waits[self._number] = now + hint_s, now, what
            return self._number

    def end(self, number: int) -> None:
        """Note that a wait has ended."""
        with self._lock:
            self._waits.pop(number, None)

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, HINT_S))
            now = time.monotonic()
            with self._lock:
                late = {n: wait for n, wait in self._waits.items() if wait[0] <= now}
                for number in late:
                    del self._waits[number]  # one hint is enough
            for _, began, what in late.values():
                _log.warning(
                    "%s has waited for other ranks for %.0f s; every rank must make this call. Is it inside "
                    "of `if rank == 0`, or has another rank ended?",
                    what,
                    now - began,
                )


_watcher = _Watcher()


@contextmanager
def hinting(rank: int, call: str, timeout_s: float | None = None) -> Iterator[None]:
    """Log a hint if the code within this context waits for other ranks for long."""
    hint_s = HINT_S if timeout_s is None else min(HINT_S, max(timeout_s / 4, _LEAST_S))
    number = _watcher.begin(f"rank {rank}: {call}", hint_s)
    try:
        yield
    finally:
        _watcher.end(number)
