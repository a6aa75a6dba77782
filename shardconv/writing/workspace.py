"""``OUT/.partial``: the workspace in which the files of an output directory are written, to survive crashes.

    OUT/.partial/job.json              everything that determines the output; no other job may continue it
    OUT/.partial/OWNER.journal         which bytes of the owner's files are on disk
    OUT/.partial/rank-.../*.safetensors
    OUT/.partial/setup.lock            held by a process that begins or finishes

An **owner** (a rank, or the common part) is written by one process at a time, which holds a lock on its
journal; so several machines can write different ranks. The process that finishes last, when the journals of
all owners are complete and no other is locked, moves the files to OUT.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shardconv_runtime.errors import ShardconvError

from .crc32 import Extent, join
from .durable import (
    LOCK_NAME,
    BusyError,
    fsync,
    is_locked,
    locked_journal,
    refuse,
    setup_lock,
    unlock,
    write_durably,
)
from .job import (
    ABANDONED,
    JOB_NAME,
    PARTIAL,
    Job,
    Moves,
    State,
    TargetFile,
    as_json,
    difference,
    displace,
    is_placed,
    known_files,
    place,
    read_state,
    write_state,
)

# A journal of writes: lines ``CRC [file, [leaf, element], [[offset, bytes, crc32], ...]]``.
#
# A line is appended once the bytes that it names are durable. It begins with its own CRC-32, as eight
# hexadecimal digits; everything from the first line whose CRC is wrong is ignored.

UnitKey = tuple[int, int]
"""The key of a unit of ``copying``."""

HEADER: UnitKey = (-1, 0)
"""The key of a file's header."""

_FORGET: UnitKey = (-2, 0)
"""The key of a line that voids all earlier ones about its file."""

_CRC_LENGTH = 9
"""The number of characters of the digits and the space."""

Written = dict[UnitKey, tuple[Extent, ...]]
"""Unit -> the extents that it wrote to one file."""


def read_log(path: Path) -> dict[int, Written]:
    """Return the durable writes to each file, by index."""
    found: dict[int, Written] = {}
    if path.is_file():
        for line in _lines(path.read_bytes()):
            index, key, extents = json.loads(line[_CRC_LENGTH:])
            if tuple(key) == _FORGET:
                found.pop(index, None)
            else:
                found.setdefault(index, {})[tuple(key)] = tuple(Extent(*extent) for extent in extents)
    return found


def append_line(handle: int, index: int, key: UnitKey, extents: Sequence[Extent]) -> None:
    """Append a line to an open journal."""
    text = json.dumps([index, key, [list(extent) for extent in extents]], separators=(",", ":")).encode()
    data = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
    while len(data):
        data = data[os.write(handle, data) :]


def forget(handle: int, index: int) -> None:
    """Void all earlier lines about a file."""
    append_line(handle, index, _FORGET, ())


def truncate_incomplete(handle: int) -> None:
    """Remove the incomplete line that a crash may have left at the end."""
    num_bytes = os.fstat(handle).st_size
    data = os.pread(handle, num_bytes, 0)
    os.ftruncate(handle, sum(len(line) + 1 for line in _lines(data)))


def _lines(data: bytes) -> list[bytes]:
    """Return the lines before the first whose CRC is wrong."""
    good = []
    for line in data.split(b"\n")[:-1]:
        if line[:_CRC_LENGTH] != b"%08x " % zlib.crc32(line[_CRC_LENGTH:]):
            break
        good.append(line)
    return good


__all__ = ["PARTIAL", "Claim", "Job", "Workspace", "known_files", "opened", "refuse_if_busy", "write_durably"]


@dataclass(frozen=True, slots=True)
class Workspace:
    """An open ``OUT/.partial``, with the owners that this process has locked."""

    out: Path
    files: tuple[TargetFile, ...]
    """Files of all owners."""
    journals: Mapping[str, int]
    """Owner -> open and locked journal, for the owners that this process writes."""

    @property
    def path(self) -> Path:
        """The directory."""
        return self.out / PARTIAL

    @property
    def is_finishing(self) -> bool:
        """Whether all files are written, and an earlier process died while it moved them to OUT."""
        state = read_state(self.path)
        return state is not None and state.moves is not None

    def location(self, index: int) -> Path:
        """Return where file ``index`` is written."""
        return self.path / self.files[index].path

    def mine(self) -> list[int]:
        """Return the indices of the files of the locked owners."""
        return [index for index, file in enumerate(self.files) if file.owner in self.journals]

    def written(self) -> dict[int, Written]:
        """Return the durable writes to files of locked owners, by index; a lost file is begun again."""
        found = self._logged(self.journals)
        for index in list(found):
            path = self.location(index)
            if not path.is_file() or path.stat().st_size != self.files[index].num_bytes:
                forget(self._journal_of(index), index)
                del found[index]
        return found

    def append(self, index: int, key: UnitKey, extents: Sequence[Extent]) -> None:
        """Journal the writes of a unit to a file, which are durable."""
        append_line(self._journal_of(index), index, key, extents)

    def sync(self) -> None:
        """Make the journals durable."""
        for handle in self.journals.values():
            os.fsync(handle)

    def checksums(self) -> dict[str, int] | None:
        """Return the CRC-32 of each file by path; None while an owner is unfinished."""
        found = self._complete()
        if None in found.values() or self._busy():
            return None
        return {path: extent.crc32 for path, extent in found.items() if extent is not None}

    def unfinished(self) -> list[str]:
        """Return the owners of incomplete files, and those that another process has locked."""
        found = self._complete()
        incomplete = {file.owner for file in self.files if found[file.path] is None}
        return sorted(incomplete | self._busy())

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no other part begins or finishes; on exit this part releases its owners."""
        with setup_lock(self.path / LOCK_NAME, self.out):
            yield
            for handle in self.journals.values():  # otherwise two last parts leave the rest to each other
                unlock(handle)

    def finish(self, paths: Sequence[str], replaced: Sequence[str]) -> None:
        """Move the files to OUT, and remove the workspace.

        Args:
            paths: all files of the new OUT, which are in the workspace; the last one makes OUT complete.
            replaced: all files of the old OUT; the last one makes that complete.
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

    def _journal_of(self, index: int) -> int:
        return self.journals[self.files[index].owner]

    def _complete(self) -> dict[str, Extent | None]:
        """Return the extent of each file by path; None for those that are not written completely."""
        written = self._logged({file.owner for file in self.files})
        found: dict[str, Extent | None] = {}
        for index, file in enumerate(self.files):
            extents = join(extent for unit in written.get(index, {}).values() for extent in unit)
            is_complete = len(extents) == 1 and extents[0][:2] == (0, file.num_bytes)
            found[file.path] = extents[0] if is_complete else None
        return found

    def _busy(self) -> set[str]:
        """Return the owners that another process writes at this moment."""
        others = {file.owner for file in self.files} - self.journals.keys()
        return {owner for owner in others if is_locked(_journal_path(self.path, owner), self.out)}

    def _logged(self, owners: Iterable[str]) -> dict[int, Written]:
        found: dict[int, Written] = {}
        for owner in owners:
            found.update(read_log(_journal_path(self.path, owner)))
        return found


@dataclass(frozen=True, slots=True)
class Claim:
    """The owners that a process writes."""

    required: Collection[str]
    """The owners that this process must write; it is refused if another process writes one of them."""
    optional: Collection[str] = ()
    """The owners that are left out because another process writes them."""


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

    Args:
        out: the output directory; it is created.
        job: everything that determines the output.
        files: files of all owners.
        claim: the owners that this process writes. If these are all, the unfinished output of another job in
            ``out`` is discarded; a part refuses instead, since other parts may be finished.
        tell: called with one line if unfinished output is discarded.
        check: called while no other process begins or finishes; raises an error if this one may not begin.

    Raises:
        ShardconvError: if another process writes the same owners, or this part does not fit the others.
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
            for handle in journals.values():
                truncate_incomplete(handle)
        yield Workspace(out, tuple(files), journals)


def refuse_if_busy(out: Path, owners: Collection[str] | None = None) -> None:
    """Refuse, before any work, an ``out`` that another process writes.

    Args:
        out: the output directory.
        owners: the owners to check; None: all.

    Raises:
        BusyError: if another process writes one of them.
    """
    for journal in (out / PARTIAL).glob("*.journal"):
        if (owners is None or journal.stem in owners) and is_locked(journal, out):
            refuse(out)


def _agree(
    out: Path, job: Job, journals: Mapping[str, int], is_part: bool, tell: Callable[[str], None]
) -> None:
    """Make this the job of the workspace; the unfinished output of another one is removed.

    Raises:
        ShardconvError: if that output is not to be discarded, or another process writes it.
    """
    partial = out / PARTIAL
    state = read_state(partial) or State(ABANDONED)  # without it, the journals may be of any job
    if state.job == job:
        return
    if state.job != ABANDONED:
        reason = difference(state.job, job)
        if is_part:
            raise ShardconvError(
                f"OUT {out} holds parts of another conversion ({reason}); use the same model and options "
                f"for all parts, or remove {partial}"
            )
        if state.moves is not None and is_placed(out, state.moves):
            raise ShardconvError(
                f"OUT {out} is the complete output of another conversion ({reason}); remove {partial}, the "
                "only leftover of that run, and pass --overwrite to replace OUT"
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


def _journal_path(partial: Path, owner: str) -> Path:
    return partial / f"{owner}.journal"
