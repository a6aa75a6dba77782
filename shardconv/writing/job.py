"""What is being written to a directory, and what of it is being moved to its place.

``OUT/.partial/job.json`` holds both: it is replaced as a whole, so that a process which finds it knows what
an earlier one was about when it died. To **place** files is to move them to OUT so that OUT is at any moment
what it was before, or nothing that looks complete, or all that it is to be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from shardconv_runtime.errors import ShardconvError

from .durable import fsync, fsync_directories, remove, write_durably

PARTIAL = ".partial"
JOB_NAME = "job.json"

Job = Mapping[str, Any]
"""What determines every byte of the output, as JSON: source files, options, versions, plan."""

LONG = 60
"""Characters of a value that an error does not show."""

ABANDONED: Job = {}
"""The job of a directory that is being cleared."""


@dataclass(frozen=True, slots=True)
class Moves:
    """All is written, and is being placed."""

    new: tuple[str, ...]
    """Paths of all files that OUT is to have; the last one makes OUT complete."""
    old: tuple[str, ...]
    """Of the files that OUT has and that go, until they are gone; the last one makes it complete now."""


@dataclass(frozen=True, slots=True)
class State:
    """What ``job.json`` says."""

    job: Job
    moves: Moves | None = None


def read_state(partial: Path) -> State | None:
    """What is being done in a ``.partial``; None where nothing was begun.

    Raises:
        ShardconvError: it cannot be told.
    """
    path = partial / JOB_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        moves = found["moves"]
        if moves is not None:
            moves = Moves(tuple(map(_safe, moves["new"])), tuple(map(_safe, moves["old"])))
        return State(dict(found["job"]), moves)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ShardconvError(
            f"{path} cannot be read, which says what was begun in {partial.parent}; "
            f"remove {partial} and run again"
        ) from error


def write_state(partial: Path, state: State) -> None:
    """Replace ``job.json``."""
    write_durably(partial / JOB_NAME, json.dumps(asdict(state), indent=1))


def as_json(job: Job) -> Job:
    """The job as it is when it was written and read."""
    found: Job = json.loads(json.dumps(job))
    return found


def known_files(out: Path) -> set[str]:
    """Files in ``out`` that an earlier process was moving there, or away, when it died."""
    state = read_state(out / PARTIAL)
    return set() if state is None or state.moves is None else {*state.moves.new, *state.moves.old}


def is_placed(out: Path, moves: Moves) -> bool:
    """Whether OUT has all that it is to have."""
    last = moves.new[-1]
    return not moves.old and not (out / PARTIAL / last).exists() and (out / last).exists()


def is_unplaced(out: Path, moves: Moves) -> bool:
    """Whether OUT still is what it was before."""
    return bool(moves.old) and (out / moves.old[-1]).exists()


def place(out: Path) -> None:
    """Move the files from ``.partial`` to OUT; if that was begun before, the rest of it.

    What goes is gone, and known to be, before anything comes: a file that has a place in OUT is new.

    Raises:
        ShardconvError: a file was lost meanwhile.
    """
    partial = out / PARTIAL
    state = read_state(partial)
    assert state is not None
    moves = state.moves
    assert moves is not None, "there is something to place"
    if moves.old:
        _require(partial, [path for path in moves.new if not (partial / path).exists()], partial)
        *files, last = moves.old
        remove(out, [last])
        fsync(out)
        remove(out, files)
        fsync_directories(out)
        write_state(partial, replace(state, moves=replace(moves, old=())))
    places = {path: (partial / path, out / path) for path in moves.new}
    _require(partial, [path for path, places in places.items() if not any(p.exists() for p in places)], out)
    for source, target in list(places.values())[:-1]:
        _move(source, target)
    fsync_directories(out)
    _move(*places[moves.new[-1]])
    fsync(out)


def displace(out: Path, moves: Moves) -> None:
    """Take back what was begun to be placed, unless OUT still is what it was before."""
    if not is_unplaced(out, moves):
        remove(out, (*moves.old, *moves.new))


def difference(old: Any, new: Any, where: str = "") -> str:
    """The first place where two jobs differ, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (*new, *old):
            if old.get(key) != new.get(key):
                return difference(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    shown = [f"{value}" for value in (old, new)]
    if any(len(text) > LONG for text in shown):
        return f"{where} is not what it was"
    return f"{where} was {shown[0]}, now it is {shown[1]}"


def _safe(path: Any) -> str:
    """A path that stays in its directory."""
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} is no path below OUT")
    return path


def _require(partial: Path, lost: list[str], remedy: Path) -> None:
    if lost:
        raise ShardconvError(
            f"{partial / lost[0]} is gone, which was to be moved to {partial.parent}; "
            f"remove {remedy} and run again"
        )


def _move(source: Path, target: Path) -> None:
    """Move a file, unless an earlier process did."""
    if source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
