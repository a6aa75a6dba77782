"""Writing: a disk that is full or breaks is said in one line, and finished files are not lost."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shardconv_runtime.checkpoint import copying
from shardconv_runtime.errors import ShardconvError, SourceError
from shardconv_runtime.files import checksums, manifest
from shardconv_runtime.files.manifest import PARTIAL
from small_conversion import Model, contents, placed

from shardconv.writing import local_files, writer
from shardconv.writing.workspace import Workspace


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A tiny model."""
    return Model.save(tmp_path / "model")


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let the disk have so much space."""
    stats = types.SimpleNamespace(f_bavail=num_bytes, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: stats)


def failing(name: str, error: Exception, after: int) -> Callable[..., Any]:
    """A function of ``os`` that fails from a call on."""
    function, calls = getattr(os, name), itertools.count()

    def wrapped(*args: Any) -> Any:
        if next(calls) >= after:
            raise error
        return function(*args)

    return wrapped


def test_too_little_space_is_said_before_anything_is_written(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 3000)
    with pytest.raises(
        ShardconvError, match=r"out needs 0\.00 GB more, and its disk has 0\.00 GB free; free"
    ):
        model.convert(tmp_path / "out")
    assert not list((tmp_path / "out" / PARTIAL).glob("*/*"))
    free(monkeypatch, 30_000)
    assert model.convert(tmp_path / "out")


def test_what_has_its_place_needs_no_more(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(writer, "complete", failing_at_once)
        with pytest.raises(KeyboardInterrupt):
            model.convert(out)
    free(monkeypatch, 0)
    assert model.convert(out)


def failing_at_once(*args: Any) -> None:
    """Die."""
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "after"), [("pwrite", 0), ("pwrite", 9), ("posix_fadvise", 1), ("fsync", 3), ("fsync", 5)]
)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_every_failing_call_is_one_line(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int, error: int
) -> None:
    out, threads = tmp_path / "out", threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(name, OSError(error, os.strerror(error)), after))
        with pytest.raises((ShardconvError, OSError)) as caught:
            model.convert(out)
    if name != "fsync":
        said = (
            f"DST {out} cannot be written: {os.strerror(error)}; correct that and run the same command again"
        )
        assert str(caught.value).startswith(said)
    assert threading.active_count() == threads
    assert not placed(out)
    assert model.convert(out)
    model.convert(tmp_path / "expected")
    assert contents(out) == contents(tmp_path / "expected")


def test_an_error_of_the_source_is_not_one_of_out(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing("preadv", OSError(errno.EIO, "Input/output error"), 1))
    with pytest.raises(
        SourceError, match=r"model\.safetensors cannot be read at byte \d+: Input/output error"
    ):
        model.convert(tmp_path / "out")


def test_files_before_a_failure_are_kept(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are finished one after another, and the bytes of unfinished ones are lost."""
    out = tmp_path / "out"
    monkeypatch.setattr(copying, "num_workers", lambda remote=False: 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing("pwrite", OSError(errno.ENOSPC, "No space left on device"), 30))
        with pytest.raises(ShardconvError, match="No space left"):
            model.convert(out, max_file_size=300)
    finished = {path: path.stat().st_mtime_ns for path in (out / PARTIAL).glob("*/*.safetensors")}
    unfinished = list((out / PARTIAL).glob("*/*.unfinished"))
    assert len(finished) > 3
    assert 0 < len(unfinished) <= 6, "about one of each rank and of what they share"
    assert model.convert(out, max_file_size=300)
    for path, time_ns in finished.items():
        assert (out / path.relative_to(out / PARTIAL)).stat().st_mtime_ns == time_ns
    model.convert(tmp_path / "full", max_file_size=300)
    assert contents(out) == contents(tmp_path / "full")


def test_files_of_several_pieces(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the bytes of a file arrive, its checksum is that of its pieces."""
    for piece in (1, 64, 1000):
        monkeypatch.setattr(checksums, "PIECE_BYTES", piece)
        monkeypatch.setattr(local_files, "PIECE_BYTES", piece)
        out = tmp_path / str(piece)
        model.convert(out)
        for entry in manifest.read(out).files:
            if entry.path.endswith(".safetensors"):
                assert entry.checksum == checksums.shard_checksum(out / entry.path)


def test_few_files_are_open(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: each is closed when it is finished."""
    counts: list[int] = []
    finish_file = Workspace.finish_file

    def counting(self: Workspace, index: int, checksum: str) -> None:
        counts.append(len(os.listdir("/proc/self/fd")))
        finish_file(self, index, checksum)

    monkeypatch.setattr(Workspace, "finish_file", counting)
    monkeypatch.setattr(copying, "num_workers", lambda remote=False: 1)
    model.convert(tmp_path / "out", max_file_size=1)
    assert len(counts) > 20
    assert max(counts) - min(counts) < 10
