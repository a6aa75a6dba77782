"""Progress of the converter: stages by name, and bars for bytes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

Advance = Callable[[int], object]
"""Called with the number of bytes done since the last call."""

LINE_EVERY_S = 30.0
"""How often a long stage prints a line to a log."""


class Progress(Protocol):
    """The receiver of the stages' reports."""

    def stage(self, text: str) -> None:
        """Begin a stage; ``text`` describes it."""

    def bar(self, label: str, total_bytes: int, done_bytes: int = 0) -> AbstractContextManager[Advance]:
        """Follow work on ``total_bytes`` bytes, of which an earlier run did ``done_bytes``."""


class Silent:
    """Progress that reports nothing."""

    def stage(self, text: str) -> None:
        """Do nothing."""

    @contextmanager
    def bar(self, label: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Advance]:
        """Do nothing."""
        yield lambda num_bytes: None


class Lines:
    """One line for each stage and each finished bar: for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr

    def stage(self, text: str) -> None:
        """Print the stage."""
        print(text, file=self.stream, flush=True)

    @contextmanager
    def bar(self, label: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Advance]:
        """Print the label and the amount at the start, then progress and rate twice a minute."""
        rest = f", of which {done_bytes / 1e6:,.1f} MB are done" if done_bytes else ""
        self.stage(f"{label}: {total_bytes / 1e6:,.1f} MB{rest}")
        done, start = done_bytes, time.monotonic()
        told = start

        def advance(num_bytes: int) -> None:
            nonlocal done, told
            done += num_bytes
            now = time.monotonic()
            if now - told >= LINE_EVERY_S and done < total_bytes:
                told, rate = now, (done - done_bytes) / (now - start)
                left = f"{(total_bytes - done) / max(rate, 1) / 60:,.1f} minutes left"
                self.stage(f"{label}: {done / total_bytes:.0%}, {rate / 1e6:,.0f} MB/s, {left}")

        yield advance


class Bars(Lines):
    """Lines for the stages and tqdm bars for bytes: for terminals."""

    @contextmanager
    def bar(self, label: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Advance]:
        """Show a tqdm bar that stays on the screen."""
        from tqdm import tqdm  # only terminals pay for the import

        with tqdm(
            total=total_bytes, initial=done_bytes, desc=label, unit="B", unit_scale=True, file=self.stream
        ) as bar:
            yield bar.update


def for_terminal(*, quiet: bool) -> Progress:
    """Return the progress that fits standard error."""
    if quiet:
        return Silent()
    return Bars() if sys.stderr.isatty() else Lines()
