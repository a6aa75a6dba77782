"""``OUT/.partial``: the workspace in which the files of an output directory are written, to survive crashes.

    OUT/.partial/job.json              everything that determines the output; no other job may continue it
    OUT/.partial/OWNER.journal         the finished files of the owner: lines ``CHECKSUM PATH``, and before
                                       each ``measured NUMBER NAME`` for numbers about its weights
    OUT/.partial/rank-.../*.safetensors.unfinished, without the suffix once they are complete and durable
    OUT/.partial/setup.lock            held by a process that begins or finishes

An **owner** (a rank, or the common part) is written by one process at a time, which holds a lock on its
journal; so several machines can write different ranks. The process that finishes last, when all files are
finished and no other owner is locked, moves the files to OUT.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shardconv_runtime.errors import OutputExistsError, ShardconvError
from shardconv_runtime.files.manifest import OF_PIECES, PARTIAL, UNUSED_NAME, FileEntry
from shardconv_runtime.files.shard_files import sample_checksum
from shardconv_runtime.files.small_files import entry_of

from .durable import LOCK_NAME, BusyError, fsync, is_locked, locked_journal, refuse, setup_lock, unlock
from .job import (
    ABANDONED,
    JOB_NAME,
    Job,
    Moves,
    State,
    TargetFile,
    as_json,
    difference,
    displace,
    is_placed,
    place,
    read_state,
    write_state,
)
from .local_files import LocalFiles, require_space

_LINE = re.compile(rf"({OF_PIECES}:[0-9a-f]{{8}}) (\S+)")
_MEASURED = re.compile(r"measured ([0-9.e+-]+) (\S+)")
_UNFINISHED = ".unfinished"
"""Suffix of a file that is being written."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """An open ``OUT/.partial``, with the owners that this process has locked."""

    out: Path
    files: tuple[TargetFile, ...]
    """Files of all owners."""
    journals: Mapping[str, int]
    """Owner -> open and locked journal, for the owners that this process writes."""

    is_in_order = False

    @property
    def path(self) -> Path:
        """The directory."""
        return self.out / PARTIAL

    @property
    def name(self) -> str:
        """The directory of the output, for messages."""
        return str(self.out)

    @property
    def owners(self) -> Collection[str]:
        """The owners that this process writes."""
        return self.journals.keys()

    @property
    def is_finishing(self) -> bool:
        """Whether all files are written, and an earlier process died while it moved them to OUT."""
        state = read_state(self.path)
        return state is not None and state.moves is not None

    def unfinished_path(self, index: int) -> Path:
        """Return where file ``index`` is while it is written."""
        return self.path / (self.files[index].path + _UNFINISHED)

    def missing(self) -> list[int]:
        """Return the indices of the files of locked owners that are not finished."""
        checksums = self._finished(self.journals)
        return [
            index
            for index, file in enumerate(self.files)
            if file.owner in self.journals and file.path not in checksums
        ]

    def target(self, missing: Sequence[int], memory: int) -> LocalFiles:
        """Begin to write files, if the disk has space for them."""
        for index in missing:
            self.unfinished_path(index).unlink(missing_ok=True)
        require_space(self.out, sum(self.files[index].num_bytes for index in missing))
        return LocalFiles(self.files, self.unfinished_path, self.finish_file)

    def entry(self, file: TargetFile, checksum: str, rank: int | None) -> FileEntry:
        """Return the entry of a finished file in a manifest."""
        if file.path == UNUSED_NAME:  # it is copied from directory to directory as other files are
            return entry_of(self.path, Path(file.path))
        return FileEntry(file.path, file.num_bytes, checksum, rank, sample_checksum(self.path / file.path))

    def finish_file(self, index: int, checksum: str) -> None:
        """Give a complete and durable file its name, and journal it."""
        file = self.files[index]
        self.unfinished_path(index).rename(self.path / file.path)
        handle = self.journals[file.owner]
        # The line break in front ends a line that a crash may have torn.
        lines = [*(f"measured {number!r} {name}" for name, number in file.measured().items())]
        data = memoryview("\n".join(["", *lines, f"{checksum} {file.path}", ""]).encode())
        while len(data):
            data = data[os.write(handle, data) :]
        os.fsync(handle)

    def checksums(self) -> dict[str, str] | None:
        """Return the checksum of each file by path; None while an owner is unfinished."""
        return None if self.unfinished() else self._finished({file.owner for file in self.files})

    def measured(self) -> dict[str, float]:
        """Return the numbers about weights in the finished files of all owners, by name, see ``largest``."""
        owners = {file.owner for file in self.files}
        return largest((m[2], float(m[1])) for m in self._lines(owners, _MEASURED))

    def unfinished(self) -> list[str]:
        """Return the owners of missing files, and those that another process has locked."""
        owners = {file.owner for file in self.files}
        checksums = self._finished(owners)
        busy = {
            owner
            for owner in owners - self.journals.keys()
            if is_locked(_journal_path(self.path, owner), self.out)
        }
        return sorted(busy | {file.owner for file in self.files if file.path not in checksums})

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no other part begins or finishes; on exit this part releases its owners."""
        with setup_lock(self.path / LOCK_NAME, self.out):
            yield
            for handle in self.journals.values():  # otherwise two last parts leave the rest to each other
                unlock(handle)

    def finish(self, paths: Sequence[str], replaced: Sequence[str]) -> None:
        """Move the files to OUT, and remove the workspace.

        The last of ``paths`` makes OUT complete, as the last of ``replaced`` made the old one.
        """
        for path in paths:
            fsync(self.path / path)
        state = read_state(self.path)
        assert state is not None
        write_state(self.path, replace(state, moves=Moves(tuple(paths), tuple(replaced))))
        self.finish_again()

    def finish_again(self) -> None:
        """Continue ``finish``."""
        place(self.out)
        _empty(self.path)

    def _finished(self, owners: Iterable[str]) -> dict[str, str]:
        """Return the checksums of the journaled files of some owners that are still there, by path."""
        checksums = {m[2]: m[1] for m in self._lines(owners, _LINE)}
        return {
            file.path: checksums[file.path]
            for file in self.files
            if file.path in checksums and _has_size(self.path / file.path, file.num_bytes)
        }

    def _lines(self, owners: Iterable[str], form: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Yield the lines of the journals of some owners that have a form."""
        for owner in owners:
            with suppress(FileNotFoundError):
                text = _journal_path(self.path, owner).read_text(encoding="utf-8", errors="replace")
                yield from (m for m in map(form.fullmatch, text.split("\n")) if m is not None)


@dataclass(frozen=True, slots=True)
class Claim:
    """The owners that a process writes."""

    required: Collection[str]
    """The owners that this process must write; it is refused if another process writes one of them."""
    optional: Collection[str] = ()
    """The owners that are left out because another process writes them."""


def largest(measured: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the largest number of each name: processes that write some ranks measure parts of weights."""
    numbers: dict[str, float] = {}
    for name, number in measured:
        numbers[name] = max(number, numbers.get(name, number))
    return numbers


@contextmanager
def opened(
    out: Path,
    job: Job,
    files: Sequence[TargetFile],
    claim: Claim,
    *,
    tell: Callable[[str], None],
    check: Callable[[], object] = lambda: None,
) -> Iterator[Workspace]:
    """Lock owners in ``OUT/.partial``, and continue the job that was begun there, or begin.

    If the claim is all owners, the unfinished output of another job is discarded, and ``tell`` gets a line
    about it; a part refuses instead, since other parts may be finished. ``check`` raises an error if this
    process may not begin; no other one begins or finishes meanwhile.
    """
    is_part = {file.owner for file in files} != {*claim.required, *claim.optional}
    partial = out / PARTIAL
    partial.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(_remove_if_empty, partial)  # after its files are closed: NFS keeps open ones
        with setup_lock(partial / LOCK_NAME, out):
            journals = {
                owner: stack.enter_context(locked_journal(_journal_path(partial, owner), out))
                for owner in claim.required
            }
            for owner in claim.optional:
                with suppress(BusyError):
                    journals[owner] = stack.enter_context(locked_journal(_journal_path(partial, owner), out))
            try:
                check()
            except ShardconvError:
                # Remove the files that this process created before it was refused.
                if not (partial / JOB_NAME).exists():
                    _empty(partial)
                raise
            _agree(out, as_json(job), journals, is_part, tell)
        yield Workspace(out, tuple(files), journals)


def refuse_if_busy(out: Path, owners: Collection[str] | None = None) -> None:
    """Refuse, before any work, an ``out`` that another process writes."""
    for journal in (out / PARTIAL).glob("*.journal"):
        if (owners is None or journal.stem in owners) and is_locked(journal, out):
            refuse(out)


def _agree(
    out: Path, job: Job, journals: Mapping[str, int], is_part: bool, tell: Callable[[str], None]
) -> None:
    """Make this the job of the workspace; the unfinished output of another one is removed."""
    partial = out / PARTIAL
    state = read_state(partial) or State(ABANDONED)  # without it, the journals may be of any job
    if state.job == job:
        return
    if state.job != ABANDONED:
        reason = difference(state.job, job)
        if is_part:
            raise OutputExistsError(
                f"DST {out} holds parts of another conversion ({reason}); use the same model and options "
                f"for all parts, or remove {partial}"
            )
        if state.moves is not None and is_placed(out, state.moves):
            raise OutputExistsError(
                f"DST {out} is the complete output of another conversion ({reason}); remove {partial}, the "
                "only leftover of that run, and pass --overwrite to replace DST"
            )
        tell(f"{reason}: the unfinished output in {out} is discarded")
    refuse_if_busy(out, {file.stem for file in partial.glob("*.journal")} - journals.keys())
    write_state(partial, replace(state, job=ABANDONED))  # a crash must not leave half of it to be continued
    if state.moves is not None:
        displace(out, state.moves)
    for handle in journals.values():
        os.ftruncate(handle, 0)
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.stem not in journals and path.name not in (JOB_NAME, LOCK_NAME):
            path.unlink()
    write_state(partial, State(job))


def _empty(partial: Path) -> None:
    """Remove a workspace; its state goes last, so that a crash in between can be continued."""
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (JOB_NAME, LOCK_NAME):
            path.unlink()
    for name in (JOB_NAME, LOCK_NAME):
        (partial / name).unlink(missing_ok=True)
    _remove_if_empty(partial)


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()
        fsync(directory.parent)


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _journal_path(partial: Path, owner: str) -> Path:
    return partial / f"{owner}.journal"
