"""The state of an output directory: the job that is written, and the finished files that are moved there.

``OUT/.partial/job.json`` holds both and is replaced atomically, so that a process which finds it knows the
state in which an earlier one died. To **place** files is to move them to OUT such that at any moment OUT is
unchanged, or does not look complete, or is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor, Shape
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.files.manifest import PARTIAL
from shardconv_runtime.files.shard_files import ALIGNMENT, FileLayout, lay_out

from .durable import fsync, fsync_directories, remove, write_durably

# Files to write; each byte has a planned place before the first file is written.

LEAST_ALIGNMENT = 8
"""Alignment of the safetensors library, for files with the same bytes as its own."""


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A safetensors file to write."""

    path: str
    """The path relative to the output directory, with ``/``."""
    owner: str
    """A rank or the common part; one process at a time writes the files of an owner."""
    layout: FileLayout
    tensor: Callable[[str], LazyTensor] = field(repr=False, compare=False)
    """The source of a tensor, by name; called when the file is written."""
    measured: Callable[[], Mapping[str, float]] = field(default=dict, repr=False, compare=False)
    """Numbers about its weights, by name, that are known when the file is written; they are journaled."""

    @property
    def header(self) -> bytes:
        """The first bytes of the file."""
        return self.layout.header

    @property
    def offsets(self) -> Mapping[str, int]:
        """Name -> offset of its first byte in the file, in the order of the file."""
        return self.layout.offsets

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.layout.num_bytes


def target_file(
    path: str,
    owner: str,
    declared: Mapping[str, tuple[str, Shape]],
    metadata: Mapping[str, str],
    tensor: Callable[[str], LazyTensor],
    alignment: int = ALIGNMENT,
) -> TargetFile:
    """Lay out a file; equal arguments give equal bytes."""
    return TargetFile(path, owner, lay_out(declared, metadata, alignment), tensor)


JOB_NAME = "job.json"

Job = Mapping[str, Any]
"""Everything that determines the bytes of the output, as JSON: source files, options, versions, plan."""

LONG = 60
"""Longer values are not shown in errors, in characters."""

ABANDONED: Job = {}
"""The job of a directory that is being cleared."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Files that are all written and are being placed."""

    new: tuple[str, ...]
    """Paths of all files of the new OUT; the last one makes it complete."""
    old: tuple[str, ...]
    """Paths of the files of the old OUT, until they are removed; the last one makes that complete."""


@dataclass(frozen=True, slots=True)
class State:
    """The content of ``job.json``."""

    job: Job
    moves: Moves | None = None


def read_state(partial: Path) -> State | None:
    """Read the state of a ``.partial``; None if nothing was begun."""
    path = partial / JOB_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        moves = document["moves"]
        if moves is not None:
            moves = Moves(tuple(map(_safe, moves["new"])), tuple(map(_safe, moves["old"])))
        return State(dict(document["job"]), moves)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ShardconvError(
            f"{path}, the state of an earlier run in {partial.parent}, cannot be read; "
            f"remove {partial} and run again"
        ) from error


def write_state(partial: Path, state: State) -> None:
    """Replace ``job.json``."""
    write_durably(partial / JOB_NAME, json.dumps(asdict(state), indent=1))


def as_json(job: Job) -> Job:
    """Return the job after a round trip through JSON."""
    plain: Job = json.loads(json.dumps(job))
    return plain


def known_files(out: Path) -> set[str]:
    """Return the files in ``out`` that an earlier process was adding or removing when it died."""
    state = read_state(out / PARTIAL)
    return set() if state is None or state.moves is None else {*state.moves.new, *state.moves.old}


def is_placed(out: Path, moves: Moves) -> bool:
    """Return whether the new OUT is complete."""
    last = moves.new[-1]
    return not moves.old and not (out / PARTIAL / last).exists() and (out / last).exists()


def place(out: Path) -> None:
    """Move the files from ``.partial`` to OUT, or continue to.

    Old files are removed, durably, before the first new one is moved: from then on any file in OUT is new.
    """
    partial = out / PARTIAL
    state = read_state(partial)
    assert state is not None
    moves = state.moves
    assert moves is not None, "only finished files are placed"
    if moves.old:
        _require(partial, [path for path in moves.new if not (partial / path).exists()], partial)
        *files, last = moves.old
        remove(out, [last])
        fsync(out)
        remove(out, files)
        fsync_directories(out)
        write_state(partial, replace(state, moves=replace(moves, old=())))
    paths = {path: (partial / path, out / path) for path in moves.new}
    _require(partial, [path for path, either in paths.items() if not any(p.exists() for p in either)], out)
    for source, target in list(paths.values())[:-1]:
        _move(source, target)
    fsync_directories(out)
    _move(*paths[moves.new[-1]])
    fsync(out)


def displace(out: Path, moves: Moves) -> None:
    """Undo a placing that was begun: remove its files, unless OUT is still unchanged."""
    # OUT is still unchanged while the last of the old files exists.
    if not (bool(moves.old) and (out / moves.old[-1]).exists()):
        remove(out, (*moves.old, *moves.new))


def difference(old: Any, new: Any, where: str = "") -> str:
    """Return all differences between two jobs as text; empty if there are none."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in dict.fromkeys((*new, *old)) if old.get(key) != new.get(key)]
        if len(keys) > 1 and "plan" in keys:
            keys.remove("plan")  # it follows from the others
        return ", ".join(difference(old.get(k), new.get(k), f"{where}.{k}" if where else k) for k in keys)
    shown = [f"{value}" for value in (old, new)]
    if any(len(text) > LONG for text in shown):
        return f"{where} changed"
    return f"{where} was {shown[0]}, is now {shown[1]}"


def _safe(path: Any) -> str:
    """Return a path that does not leave its directory, or raise ``ValueError``."""
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} is not a path below OUT")
    return path


def _require(partial: Path, lost: list[str], remedy: Path) -> None:
    if lost:
        raise ShardconvError(
            f"{partial / lost[0]} was to be moved to {partial.parent} and is gone; "
            f"remove {remedy} and run again"
        )


def _move(source: Path, target: Path) -> None:
    """Move a file, unless an earlier process already has."""
    if source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
