"""``OUT/.partial``: killed at any moment a conversion is continued, and OUT never looks what it is not."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from shardconv_runtime.checkpoint import lazy_tensor
from shardconv_runtime.errors import ShardconvError, SourceError
from shardconv_runtime.files import manifest
from shardconv_runtime.files.manifest import COMMON_DIRECTORY, PARTIAL, rank_directory
from small_conversion import Model, Stages, at_once, contents, crashes, looks_complete, placed

import shardconv
from shardconv.arguments import Writing
from shardconv.writing import workspace, writer
from shardconv.writing.fill import fill
from shardconv.writing.job import (
    JOB_NAME,
    Moves,
    State,
    TargetFile,
    difference,
    read_state,
    target_file,
    write_state,
)
from shardconv.writing.outputs import Output
from shardconv.writing.workspace import Claim, Workspace, opened, refuse_if_busy

VERSIONS = {"shardconv": "1", "torch": "1", "transformers": "1", "safetensors": "1"}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory in which syncing is quick, where there is one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as path:
        yield Path(path)


@pytest.fixture
def model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A tiny model; nothing is slow."""
    monkeypatch.setattr(writer, "tool_versions", lambda: VERSIONS)
    return Model.save(directory / "model")


Work = Callable[[], object]


@pytest.fixture(params=["sample", pytest.param("all", marks=pytest.mark.slow)])
def step(request: pytest.FixtureRequest) -> int:
    """Of calls between two kills: a sample of those that move files, or all of them."""
    return 5 if request.param == "sample" else 1


def kill_often(
    work: Work, check: Callable[[int], object], reset: Work, out: Path, step: int, how: str = "after"
) -> int:
    """Kill some work after every few calls that change files; how many there are.

    ``scripts/faults`` does all, and at random times.
    """
    number = 1
    while True:
        reset()
        if not crashes(work, number, how):
            return number
        state = read_state(out / PARTIAL)
        number += step if state is not None and state.moves is not None else 6 + step
        check(number)


def resumes(work: Work, out: Path, new: dict[str, bytes]) -> None:
    """Do the work again: the result is ``new``."""
    if placed(out) == new and contents(out / PARTIAL).keys() <= {"setup.lock"}:
        work()  # it was complete, to the last detail
        shutil.rmtree(out / PARTIAL, ignore_errors=True)
    else:
        work()
    assert contents(out) == new


class TestKilled:
    """After calls that change a file or a name."""

    def test_a_new_directory(self, model: Model, directory: Path, step: int) -> None:
        out = directory / "out"
        model.convert(directory / "expected")
        new = contents(directory / "expected")

        def check(number: int) -> None:
            if looks_complete(out):
                assert placed(out) == new, number
            resumes(lambda: model.convert(out), out, new)

        def begin() -> None:
            shutil.rmtree(out, ignore_errors=True)

        assert kill_often(lambda: model.convert(out), check, begin, out, step) > 80
        assert kill_often(lambda: model.convert(out), check, begin, out, step, "half") > 20

    def test_over_an_older_conversion(self, model: Model, directory: Path, step: int) -> None:
        out, kept = directory / "out", directory / "kept"
        model.convert(kept, tp=4)
        model.convert(directory / "expected")
        old, new = contents(kept), contents(directory / "expected")

        def begin() -> None:
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(kept, out)

        def work() -> None:
            model.convert(out, overwrite=True)

        def check(number: int) -> None:
            if looks_complete(out):
                assert placed(out) in (old, new), number
            work()
            assert contents(out) == new

        assert kill_often(work, check, begin, out, step) > 80

    @pytest.mark.parametrize("begun", ["moving", "to be moved", "moving over"])
    def test_while_another_job_is_thrown_away(
        self, model: Model, directory: Path, begun: str, step: int
    ) -> None:
        """One that was about to move its files to OUT, over a complete conversion or not."""
        out, kept, other = directory / "out", directory / "kept", directory / "other"
        kept.mkdir()
        if begun != "moving":
            model.convert(kept, tp=4, overwrite=True)
        old = contents(kept)

        def is_wanted() -> bool:
            state = read_state(other / PARTIAL)
            if state is None or state.moves is None:
                return False
            come = [path for path in placed(other) if path in state.moves.new and path not in old]
            return (
                looks_complete(other) if begun == "to be moved" else bool(come) and not looks_complete(other)
            )

        for number in itertools.count(60, 2):
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(kept, other)
            assert crashes(lambda: model.convert(other, tp=1, overwrite=True), number, "after")
            if is_wanted():
                break
        model.convert(directory / "expected")
        new = contents(directory / "expected")

        def begin() -> None:
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(other, out)

        def work() -> None:
            model.convert(out, overwrite=True)

        model.convert(directory / "first", tp=1)
        first, other_out = contents(directory / "first"), directory / "other out"

        def check(number: int) -> None:
            if looks_complete(out):
                assert placed(out) in (old, new), number
            else:  # the first job wins after all
                shutil.copytree(out, other_out)
                model.convert(other_out, tp=1, overwrite=True)
                assert contents(other_out) == first, number
                shutil.rmtree(other_out)
            work()
            assert contents(out) == new

        assert kill_often(work, check, begin, out, step) > 80


class TestContinued:
    """What an earlier run left, and what became of it meanwhile."""

    def left(self, model: Model, out: Path, **options: int) -> None:
        """All files are written and journaled, and none is placed."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "complete", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model.convert(out, **options)

    def again(self, model: Model, out: Path, **options: int) -> int:
        """Run again; how many bytes were written to shards."""
        written: list[int] = []
        pwrite = os.pwrite

        def counting(handle: int, data: memoryview, offset: int) -> int:
            written.append(len(data))
            return pwrite(handle, data, offset)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", counting)
            model.convert(out, **options)
        model.convert(out.parent / "expected", **options)
        assert contents(out) == contents(out.parent / "expected")
        return sum(written)

    def test_nothing_is_written_twice(self, model: Model, directory: Path) -> None:
        out = directory / "out"
        self.left(model, out, max_file_size=300)
        assert self.again(model, out, max_file_size=300) == 0

    @pytest.mark.parametrize("damage", ["removed", "shorter", "empty", "directory removed"])
    def test_a_lost_file_is_written_again(self, model: Model, directory: Path, damage: str) -> None:
        out = directory / "out"
        self.left(model, out)
        lost = out / PARTIAL / rank_directory(1, 2) / "model-00001-of-00001.safetensors"
        size = lost.stat().st_size
        if damage == "removed":
            lost.unlink()
        elif damage == "directory removed":
            shutil.rmtree(lost.parent)
        else:
            os.truncate(lost, 0 if damage == "empty" else size - 1)
        assert self.again(model, out) == size

    @pytest.mark.parametrize(
        "garbage",
        [
            b"",
            b"crc32-of-pieces:00000000 common/mod",
            b"crc32-of-pieces:0000 common/model-00001-of-00001.safetensors\n",
            b"crc32-of-pieces:00000000 ../model/model.safetensors\n",
            b"\0" * 300,
            b"\xff\xfe\n",
        ],
    )
    def test_a_journal_of_garbage_says_nothing(self, model: Model, directory: Path, garbage: bytes) -> None:
        out = directory / "out"
        self.left(model, out)
        (out / PARTIAL / f"{COMMON_DIRECTORY}.journal").write_bytes(garbage)
        size = (out / PARTIAL / COMMON_DIRECTORY / "model-00001-of-00001.safetensors").stat().st_size
        assert self.again(model, out) == size

    @pytest.mark.parametrize("torn", [1, 20, 60])
    def test_a_torn_line_costs_its_file(self, model: Model, directory: Path, torn: int) -> None:
        """And not the next one, whose line comes after it."""
        out = directory / "out"
        self.left(model, out, max_file_size=300)
        journal = out / PARTIAL / f"{rank_directory(1, 2)}.journal"
        data = journal.read_bytes()
        journal.write_bytes(data[:-torn])
        path = data.split()[-1].decode()
        size = (out / PARTIAL / path).stat().st_size
        assert self.again(model, out, max_file_size=300) == (0 if torn == 1 else size)

    def test_an_unfinished_file_is_begun_again(self, model: Model, directory: Path) -> None:
        out = directory / "out"
        self.left(model, out)
        finished = out / PARTIAL / rank_directory(1, 2) / "model-00001-of-00001.safetensors"
        size = finished.stat().st_size
        finished.rename(f"{finished}.unfinished")
        assert self.again(model, out) == size

    def test_a_journal_that_is_gone_says_nothing(self, model: Model, directory: Path) -> None:
        out = directory / "out"
        self.left(model, out)
        (out / PARTIAL / f"{COMMON_DIRECTORY}.journal").unlink()
        assert self.again(model, out) > 0

    def test_journals_without_a_job_say_nothing(self, model: Model, directory: Path) -> None:
        out = directory / "out"
        self.left(model, out)
        (out / PARTIAL / JOB_NAME).unlink()
        assert self.again(model, out) == sum(path.stat().st_size for path in out.rglob("*.safetensors"))

    def test_what_does_not_belong_there_goes(self, model: Model, directory: Path) -> None:
        out = directory / "out"
        self.left(model, out)
        (out / PARTIAL / "old.journal").write_text("of an older version")
        (out / PARTIAL / "leftover").mkdir()
        (out / PARTIAL / "leftover" / "a").write_text("a")
        assert self.again(model, out) == 0

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "5", "{}", '{"job": 5, "moves": null}', '{"job": {}, "moves": {"new": []}}']
    )
    def test_a_job_that_cannot_be_read_is_refused(self, model: Model, directory: Path, text: str) -> None:
        """What was begun, and where its files are, is not known then."""
        out = directory / "out"
        self.left(model, out)
        (out / PARTIAL / JOB_NAME).write_text(text)
        with pytest.raises(
            ShardconvError,
            match=r"job\.json, the state of an .*, cannot be read; remove .*/\.partial and run",
        ):
            model.convert(out)

    @pytest.mark.parametrize("path", ["../model/config.json", "/etc/passwd", "a/../../model/config.json", ""])
    def test_paths_that_lead_out_of_out_are_refused(self, model: Model, directory: Path, path: str) -> None:
        out = directory / "out"
        self.left(model, out)
        state = read_state(out / PARTIAL)
        assert state is not None
        write_state(out / PARTIAL, State(state.job, Moves((path, "manifest.json"), ())))
        with pytest.raises(ShardconvError, match=r"job\.json, .* cannot be read"):
            model.convert(out)
        assert (model.path / "config.json").exists()

    def test_another_job_is_said_and_begun_anew(self, model: Model, directory: Path) -> None:
        out, told = directory / "out", Stages()
        self.left(model, out)
        other = Model.save(directory / "other", vocab_size=12)
        other.convert(out, progress=told)
        (text,) = (text for text in told.told if "is discarded" in text)
        assert text.startswith("source.name was model, is now other, source.files was ")
        assert text.endswith(f": the unfinished output in {out} is discarded")
        other.convert(directory / "expected")
        assert contents(out) == contents(directory / "expected")

    def test_a_source_that_changed_is_said_and_read_anew(self, model: Model, directory: Path) -> None:
        out, told = directory / "out", Stages()
        self.left(model, out)
        data = bytearray(model.file.read_bytes())
        data[-5] ^= 1
        model.file.write_bytes(bytes(data))
        model.convert(out, progress=told)
        assert any(
            re.match("source.files was [0-9a-f]{8}, is now [0-9a-f]{8}: the unfinished output", text)
            for text in told.told
        )
        model.convert(directory / "expected")
        assert contents(out) == contents(directory / "expected")

    def test_a_source_that_changes_while_it_is_read_is_not_mixed(
        self, model: Model, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = directory / "out"

        def change(data: bytes) -> None:
            model.file.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])

        fill, data = writer.fill, model.file.read_bytes()
        monkeypatch.setattr(writer, "fill", lambda *args, **options: (fill(*args, **options), change(data)))
        with pytest.raises(
            SourceError, match=r"model changed while it was read \(files was .*; run the same"
        ):
            model.convert(out)
        assert not placed(out)
        monkeypatch.setattr(writer, "fill", fill)
        model.convert(out)
        model.convert(directory / "expected")
        assert contents(out) == contents(directory / "expected")

    def stopped(self, model: Model, out: Path, patched: str, **options: Any) -> tuple[str, ...]:
        """A run that dies in a function; the files that it was to place."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patched, lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model.convert(out, **options)
        state = read_state(out / PARTIAL)
        assert state is not None
        assert state.moves is not None
        return state.moves.new

    @pytest.mark.parametrize("which", [0, -1])
    def test_a_file_that_was_lost_before_it_was_moved(
        self, model: Model, directory: Path, which: int
    ) -> None:
        out = directory / "out"
        model.convert(out)
        before = contents(out)
        new = self.stopped(model, out, "shardconv.writing.workspace.place", tp=1, overwrite=True)
        (out / PARTIAL / new[which]).unlink()
        with pytest.raises(ShardconvError, match=r"was to be moved .* and is gone; remove .*/\.partial and"):
            model.convert(out, tp=1, overwrite=True)
        assert placed(out) == before, "what is there stays"
        shutil.rmtree(out / PARTIAL)
        model.convert(out, tp=1, overwrite=True)
        model.convert(directory / "expected", tp=1)
        assert contents(out) == contents(directory / "expected")

    @pytest.mark.parametrize("which", [0, -1])
    def test_a_file_that_was_lost_while_others_were_moved(
        self, model: Model, directory: Path, which: int
    ) -> None:
        out = directory / "out"
        model.convert(out)
        new = self.stopped(model, out, "shardconv.writing.job._move", tp=1, overwrite=True)
        (out / PARTIAL / new[which]).unlink()
        with pytest.raises(
            ShardconvError, match=r"was to be moved .*/out and is gone; remove .*/out and run"
        ):
            model.convert(out, tp=1, overwrite=True)
        assert not looks_complete(out)

    def test_a_complete_directory_is_not_taken_for_a_begun_one(self, model: Model, directory: Path) -> None:
        """A run that died when it had only to remove .partial; then comes another model."""
        out = directory / "out"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workspace, "_empty", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model.convert(out)
        complete = placed(out)
        for overwrite in (False, True):
            with pytest.raises(
                ShardconvError, match=r"is the complete output of another conversion \(tp was 2, is now"
            ):
                model.convert(out, tp=1, overwrite=overwrite)
            assert placed(out) == complete
        model.convert(out)
        assert contents(out) == complete


class TestAtOnce:
    """Several processes, here several open workspaces."""

    @pytest.fixture
    def files(self, directory: Path) -> list[TargetFile]:
        """Of three owners."""

        def file(owner: str) -> TargetFile:
            return target_file(
                f"{owner}/a", owner, {"x": ("int8", (3,))}, {}, lambda name: lazy_tensor.zeros("int8", (3,))
            )

        return [file(owner) for owner in ("a", "b", "c")]

    def open(self, directory: Path, files: list[TargetFile], owners: str, optional: str = "") -> Any:
        """A workspace of some owners."""
        return opened(directory / "out", {"a": 1}, files, Claim(set(owners), set(optional)), tell=print)

    def fill(self, workspace: Workspace) -> None:
        fill(workspace, memory=1 << 20, progress=Stages())

    def test_a_second_one_is_refused(self, directory: Path, files: list[TargetFile]) -> None:
        with self.open(directory, files, "abc"):
            for owners in ("abc", "a", "bc"):
                with pytest.raises(ShardconvError, match="is being written by another process; wait for it"):
                    self.open(directory, files, owners).__enter__()
            with pytest.raises(ShardconvError, match="is being written by another process"):
                refuse_if_busy(directory / "out")
        refuse_if_busy(directory / "out")
        with self.open(directory, files, "abc"):
            pass

    def test_before_any_work(self, model: Model, directory: Path, files: list[TargetFile]) -> None:
        with self.open(directory, files, "b"):
            for owners in (None, {"a", "b"}):
                with pytest.raises(ShardconvError, match="is being written by another process"):
                    Output.prepare(directory / "out", overwrite=False, source=model.path, owners=owners)
            Output.prepare(directory / "out", overwrite=False, source=model.path, owners={"a"})

    def test_before_the_model_is_read(
        self, model: Model, directory: Path, files: list[TargetFile], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stop(*args: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("shardconv.conversion.resolve", stop)
        with self.open(directory, files, "b"):
            with pytest.raises(ShardconvError, match="is being written by another process"):
                shardconv.convert(model.path, directory / "out", 2)
            with pytest.raises(KeyboardInterrupt):
                shardconv.convert(model.path, directory / "out", 2, writing=Writing(ranks="1"))

    def test_parts_of_other_owners_go_on(self, directory: Path, files: list[TargetFile]) -> None:
        with self.open(directory, files, "a", "c") as one, self.open(directory, files, "b", "c") as two:
            assert one.journals.keys() == {"a", "c"}
            assert two.journals.keys() == {"b"}

    def test_a_part_of_another_job_is_refused(self, directory: Path, files: list[TargetFile]) -> None:
        out = directory / "out"
        with self.open(directory, files, "a"):
            pass
        with pytest.raises(ShardconvError, match=r"holds parts of another conversion \(a was 1, is now 2\)"):
            opened(out, {"a": 2}, files, Claim({"b"}), tell=print).__enter__()
        told: list[str] = []
        with opened(out, {"a": 2}, files, Claim({"a", "b", "c"}), tell=told.append):
            assert told == [f"a was 1, is now 2: the unfinished output in {out} is discarded"]

    def test_another_job_is_not_thrown_away_while_a_part_is_written(
        self, directory: Path, files: list[TargetFile]
    ) -> None:
        out, others = directory / "out", [file for file in files if file.owner != "c"]
        with self.open(directory, files, "c") as part:
            self.fill(part)
            with pytest.raises(ShardconvError, match="is being written by another process"):
                opened(out, {"a": 2}, others, Claim({"a", "b"}), tell=print).__enter__()
            assert (out / PARTIAL / "c/a").read_bytes().endswith(bytes(3))
        state = read_state(out / PARTIAL)
        assert state is not None
        assert state.job == {"a": 1}

    @pytest.mark.parametrize("order", list(itertools.permutations("abc")))
    def test_the_last_one_completes_it(
        self, directory: Path, files: list[TargetFile], order: tuple[str, ...]
    ) -> None:
        """All are done before the first one looks whether it is the last."""
        out = directory / "out"
        with ExitStack() as stack:
            parts = {owner: stack.enter_context(self.open(directory, files, owner)) for owner in "abc"}
            for part in parts.values():
                self.fill(part)
            for place, owner in enumerate(order):
                part = parts[owner]
                with part.exclusive():
                    checksums = part.checksums()
                    assert part.unfinished() == sorted(order[place + 1 :])
                    assert (checksums is not None) == (place == 2)
                    if checksums is not None:
                        part.finish([file.path for file in files], [])
        assert contents(out).keys() == {"a/a", "b/a", "c/a"}
        assert not (out / PARTIAL).exists()

    def test_parts_race(self, model: Model, directory: Path) -> None:
        """In processes, of which any may be the last."""
        model.convert(directory / "expected", tp=4)
        new = contents(directory / "expected")
        for number in range(12):
            out = directory / f"out {number}"
            parts = [(0,), (1, 2), (3,)] if number % 2 else [(0,), (1,), (2,), (3,)]
            works = [functools.partial(model.convert, out, tp=4, ranks=ranks) for ranks in parts]
            assert at_once(works) == [0] * len(parts)
            assert contents(out) == new

    def test_one_of_two_that_want_the_same(self, model: Model, directory: Path) -> None:
        model.convert(directory / "expected")
        new = contents(directory / "expected")
        for number in range(8):
            out = directory / f"out {number}"
            assert 0 in at_once([functools.partial(model.convert, out)] * 2)
            assert contents(out) == new

    def test_one_that_died_is_not_waited_for(self, directory: Path, files: list[TargetFile]) -> None:
        with self.open(directory, files, "ab") as part:
            self.fill(part)  # and no more
        with self.open(directory, files, "c") as last:
            self.fill(last)
            with last.exclusive():
                assert last.unfinished() == []
                assert last.checksums() is not None

    def test_one_that_waited_while_out_was_completed(self, directory: Path, files: list[TargetFile]) -> None:
        waiting: list[BaseException] = []

        def wait() -> None:
            try:
                self.open(directory, files, "a").__enter__()
            except ShardconvError as error:
                waiting.append(error)

        thread = threading.Thread(target=wait)
        with self.open(directory, files, "abc") as one:
            self.fill(one)
            with one.exclusive():
                thread.start()
                time.sleep(0.2)
                one.finish([file.path for file in files], [])
        thread.join()
        assert "was completed by another process meanwhile; nothing is left to do" in str(waiting[0])
        assert contents(directory / "out").keys() == {"a/a", "b/a", "c/a"}

    def test_what_another_process_completed_meanwhile_is_not_replaced(
        self, model: Model, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = directory / "out"
        prepare = Output.prepare.__func__  # type: ignore[attr-defined]

        def slow(*args: Any, **options: Any) -> Output:
            found: Output = prepare(Output, *args, **options)
            with monkeypatch.context() as patch:
                patch.setattr(Output, "prepare", functools.partial(prepare, Output))
                model.convert(out, tp=1)
            return found

        monkeypatch.setattr(Output, "prepare", slow)
        with pytest.raises(ShardconvError, match="was written by another process meanwhile; name another"):
            model.convert(out, tp=2)
        assert manifest.read(out).tp == 1
        assert not (out / PARTIAL).exists()


def test_lines_of_a_journal_come_after_the_bytes(
    model: Model, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine loses what was not synced: no file that a journal names."""
    dirty: set[str] = set()
    finished: list[str] = []

    def path_of(handle: int) -> str:
        return os.readlink(f"/proc/self/fd/{handle}")

    def pwrite(handle: int, data: memoryview, offset: int) -> int:
        dirty.add(path_of(handle))
        return calls["pwrite"](handle, data, offset)

    def fsync(handle: int) -> None:
        dirty.discard(path_of(handle))
        calls["fsync"](handle)

    def finish_file(self: Workspace, index: int, checksum: str) -> None:
        finished.append(self.files[index].path)
        assert str(self.unfinished_path(index)) not in dirty
        real(self, index, checksum)

    calls: dict[str, Any] = {name: getattr(os, name) for name in ("pwrite", "fsync")}
    real = Workspace.finish_file
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Workspace, "finish_file", finish_file)
    model.convert(directory / "out", max_file_size=300)
    assert len(finished) == len(set(finished)) > 10


def test_placed_files_were_synced(model: Model, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file before the first is moved, every name before the manifest is."""
    synced: set[str] = set()
    moved: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def move(source: Path, target: Path) -> None:
        if PARTIAL in str(source) and PARTIAL not in str(target):
            assert str(source) in synced
            if Path(target).name == "manifest.json":
                assert {str(Path(path).parent) for path in moved} <= synced
            moved.append(str(target))
            synced.discard(str(Path(target).parent))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", move)
    model.convert(directory / "out")
    assert moved[-1].endswith("manifest.json")
    assert len(moved) == len(contents(directory / "out"))


@pytest.mark.parametrize(
    ("ranks", "common", "text"),
    [
        ([0], False, "rank 0"),
        ([0, 1, 2, *range(4, 64)], False, "ranks 0-2, 4-63"),
        ([1, 3], True, "ranks 1, 3 and common"),
        ([], True, "common"),
    ],
)
def test_missing_parts_in_short(ranks: list[int], common: bool, text: str) -> None:
    owners = [rank_directory(rank, 64) for rank in ranks] + [COMMON_DIRECTORY] * common
    assert writer.listed_owners(owners, 64) == text


def test_differences_of_jobs() -> None:
    assert difference({"a": {"b": 1}}, {"a": {"b": 2}}) == "a.b was 1, is now 2"
    assert difference({"a": 1}, {"a": 1, "c": "x"}) == "c was None, is now x"
    assert difference({"plan": "0" * 64}, {"plan": "1" * 64}) == "plan changed"
