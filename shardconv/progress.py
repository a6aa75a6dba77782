"""What a person sees while the converter works: stages by name, and bars for bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

Advance = Callable[[int], object]
"""Called with the number of bytes that are done since the last call."""


class Progress(Protocol):
    """Where the stages report to."""

    def stage(self, text: str) -> None:
        """A stage begins; ``text`` says what it does."""

    def bar(self, label: str, total_bytes: int) -> AbstractContextManager[Advance]:
        """Follow work on ``total_bytes`` bytes."""


class Silent:
    """Reports nothing."""

    def stage(self, text: str) -> None:
        """Nothing."""

    @contextmanager
    def bar(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """Nothing."""
        yield lambda num_bytes: None


class Lines:
    """One line for each stage and each finished bar: for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr

    def stage(self, text: str) -> None:
        """Print the stage."""
        print(text, file=self.stream, flush=True)

    @contextmanager
    def bar(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """Print the label and the amount at the start."""
        self.stage(f"{label}: {total_bytes / 1e6:,.1f} MB")
        yield lambda num_bytes: None


class Bars(Lines):
    """Lines for the stages and tqdm bars for bytes: for terminals."""

    @contextmanager
    def bar(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """A tqdm bar that stays on the screen."""
        from tqdm import tqdm  # only terminals pay for the import

        with tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, file=self.stream) as bar:
            yield bar.update


def for_terminal(*, quiet: bool) -> Progress:
    """The progress that fits standard error."""
    if quiet:
        return Silent()
    return Bars() if sys.stderr.isatty() else Lines()
