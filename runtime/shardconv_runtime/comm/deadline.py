"""A limit of time for steps that wait for other ranks on a GPU, where nothing else ends the wait.

NCCL's watchdog monitors the collectives that torch issues. A CUDA graph issues its collectives itself:
if a rank raised, the others are in a kernel that never ends, for which the host waits as well. Here a thread
watches whether the host gets on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import torch.distributed as dist

from ..errors import LaunchError, RanksTimeoutError, ShardconvError
from .mesh import Launch, can_capture
from .process_groups import abort_groups, timeout_of

# The errors of collectives when another rank has ended, in our words.

_SIGNS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Socket Timeout", "Broken pipe")
"""Parts of messages of gloo, which raises a RuntimeError."""


def raise_lost_rank(error: RuntimeError, start: Launch) -> None:
    """Raise ``LaunchError`` if a collective failed because of another rank; return for other errors."""
    if isinstance(error, ShardconvError):
        return
    if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _SIGNS):
        return
    first = next(iter(str(error).splitlines()), type(error).__name__)
    raise RanksTimeoutError(
        f"rank {start.rank}: another rank ended, or did not answer, during generate; its own output says why "
        f"({first})"
    ) from error


GRACE_S = 30
"""How long the host may take to notice that the communicators were aborted."""

EXIT_CODE = 70
"""Exit code of a process that did not notice."""

_running: list[Deadline] = []


@contextlib.contextmanager
def deadline(start: Launch) -> Iterator[None]:
    """End the wait for other ranks if no progress is reported for as long as a collective may take.

    The time counts from the first report, and the compiler's counts, too. Without nccl, or other ranks,
    nothing is watched: collectives have their own limit.
    """
    if start.world_size == 1 or not can_capture(start):
        yield
        return

    assert start.group is not None
    group, limit = start.group, timeout_of(start.group)
    with Deadline(start.rank, limit.total_seconds(), lambda: abort_groups(group)):
        yield


def progress() -> None:
    """Note that the host made progress, such as the next token."""
    for watched in _running:
        watched.progress()


def pause() -> None:
    """Note that the next step is compiled first: the time starts again with the next ``progress``."""
    for watched in _running:
        watched.pause()


class Deadline:
    """A limit of time from each call of ``progress`` to the next one, or to the end, as a context.

    Args:
        clock: seconds.
    """

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        abort: Callable[[], None],
        end: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = GRACE_S,
    ) -> None:
        self._message = (
            f"rank {rank}: no progress in {timeout_s:.0f} s, as another rank ended, failed or takes longer; "
            "its own output says why (load(timeout_s=) sets the limit)"
        )
        self._timeout_s = timeout_s
        self._abort = abort
        self._end = end
        self._clock = clock
        self._grace_s = grace_s
        self._last: float | None = None
        self._left = threading.Event()
        self._expired = threading.Event()

    def __enter__(self) -> Self:
        _running.append(self)
        threading.Thread(target=self._watch, name="shardconv deadline", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        _running.remove(self)
        if self._expired.is_set() and not isinstance(error, LaunchError):
            raise RanksTimeoutError(self._message) from error  # results since then are of no use

    def progress(self) -> None:
        """Start the time again."""
        if self._expired.is_set():
            raise RanksTimeoutError(self._message)
        self._last = self._clock()

    def pause(self) -> None:
        """Do not count the time until the next ``progress``."""
        self._last = None

    def _watch(self) -> None:
        while not self._left.wait(min(1, self._timeout_s / 10)):
            if self._last is not None and self._clock() - self._last > self._timeout_s:
                self._expired.set()
                print(f"shardconv: {self._message}", file=sys.stderr, flush=True)
                self._abort()
                if not self._left.wait(self._grace_s):
                    self._end(EXIT_CODE)
                return
