"""Writes the missing files of a destination; each is durable and recorded as soon as it is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from shardconv_runtime.checkpoint.boxes import within
from shardconv_runtime.checkpoint.copying import CopyUnit, PlacedTensor, plan_units, run
from shardconv_runtime.errors import ShardconvError

from ..reporting.progress import Progress
from .job import TargetFile


class Target(Protocol):
    """Takes the bytes of files, from several threads."""

    def open(self, index: int) -> None:
        """Begin a file with its header."""

    def put(self, index: int, offset: int, data: memoryview) -> None:
        """Take bytes at an offset of a file; the last bytes of the file finish it."""

    def begin_unit(self) -> None:
        """Wait until the bytes of another unit can be taken."""

    def end_unit(self, num_bytes: int) -> None:
        """Note that all bytes of a unit have been put."""

    def finish(self) -> None:
        """Wait until all files are finished."""

    def stop(self) -> None:
        """Give up, since another thread failed; nothing waits any more."""


class Destination(Protocol):
    """A directory, on a disk or in an object store, of which this process writes some owners."""

    @property
    def name(self) -> str:
        """Return its name in messages."""

    @property
    def files(self) -> Sequence[TargetFile]:
        """Return the files of all owners."""

    @property
    def owners(self) -> Collection[str]:
        """Return the owners that this process writes."""

    @property
    def is_in_order(self) -> bool:
        """Return whether the bytes of a file are kept in memory until those before them have come."""

    def missing(self) -> list[int]:
        """Return the indices of the files of these owners that are not finished."""

    def target(self, missing: Sequence[int], memory: int) -> AbstractContextManager[Target]:
        """Begin to write these files, through buffers of ``memory`` bytes."""


def fill(destination: Destination, *, memory: int, progress: Progress, title: str = "writing") -> None:
    """Write the missing files of this process's owners, through I/O buffers of ``memory`` bytes."""
    files, missing = destination.files, destination.missing()
    # The n-th files of all ranks hold parts of the same parameters. They are written together, so the source
    # is read once for any number of ranks, and a crash costs at most about one file of each.
    turn: dict[int, int] = {}
    num_files: Counter[str] = Counter()
    for index in missing:
        owner = files[index].owner
        turn[index] = num_files[owner]
        num_files[owner] += 1
    placed = (
        PlacedTensor(files[index].tensor(name), index, offset)
        for index in missing
        for name, offset in files[index].offsets.items()
    )
    units = plan_units(placed, memory)

    def place(unit: CopyUnit) -> tuple[int, int]:
        if not destination.is_in_order:
            return min(turn[move.file] for move in unit.moves), 0  # sorting is stable: else as in the source
        boxes = (box for move in unit.moves for box in within(move, unit.start, unit.stop))
        return min(((turn[box.file], box.offset) for box in boxes), default=(0, 0))

    units.sort(key=place)
    total = sum(file.num_bytes for file in files if file.owner in destination.owners)
    rest = sum(files[index].num_bytes for index in missing)
    try:
        with (
            destination.target(missing, memory) as target,
            progress.bar(title, total, total - rest) as advance,
        ):
            advance(sum(len(files[index].header) for index in missing))
            for index in missing:
                if files[index].num_bytes == len(files[index].header):
                    target.open(index)  # no unit opens it

            def begin() -> _Sink:
                target.begin_unit()
                return _Sink(target)

            def end(unit: CopyUnit, sink: _Sink) -> None:
                target.end_unit(sink.num_bytes)
                advance(sink.num_bytes)

            run(units, begin, end, target.stop)
            target.finish()
    except ShardconvError:
        raise  # some are errors of the system, too
    except OSError as error:
        raise ShardconvError(
            f"DST {destination.name} cannot be written: {error.strerror or error}; correct that and run the "
            "same command again, which continues"
        ) from error


@dataclass
class _Sink:
    """A writer for the bytes of one unit, which counts them."""

    target: Target
    num_bytes: int = 0

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of a file."""
        self.num_bytes += len(data)
        self.target.put(file, offset, data)
