"""Writing: a disk that is full or breaks is said in one line, and what was journaled is not lost."""

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
from small_conversion import Model, contents, placed

from shardconv.writing import fill
from shardconv.writing.job import PARTIAL


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
    """Even what was written and not journaled."""
    out = tmp_path / "out"
    monkeypatch.setattr(os, "fdatasync", failing("fdatasync", OSError(errno.EIO, "Input/output error"), 0))
    with pytest.raises(ShardconvError, match="Input/output error"):
        model.convert(out)
    monkeypatch.undo()
    for path in (out / PARTIAL).glob("*/*.safetensors"):
        with path.open("r+b") as file:
            os.fsync(file.fileno())
    free(monkeypatch, 0)
    assert model.convert(out)


@pytest.mark.parametrize(("name", "after"), [("pwrite", 0), ("pwrite", 9), ("fdatasync", 0), ("fsync", 3)])
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
            f"OUT {out} cannot be written: {os.strerror(error)}; correct that and run the same command again"
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


def test_work_before_a_failure_is_kept(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal names it, although no second had passed."""
    out = tmp_path / "out"
    monkeypatch.setattr(copying, "num_workers", lambda remote=False: 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing("pwrite", OSError(errno.ENOSPC, "No space left on device"), 12))
        with pytest.raises(ShardconvError, match="No space left"):
            model.convert(out)
    again = itertools.count()
    pwrite = os.pwrite

    def counting(*args: Any) -> int:
        next(again)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", counting)
    model.convert(out)
    first = next(again)
    again = itertools.count()
    model.convert(tmp_path / "full")
    assert first < next(again)


def test_a_failing_sync_in_the_background_ends_the_work(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only at the end of it."""
    monkeypatch.setattr(fill, "SYNC_EVERY_S", 0.001)
    monkeypatch.setattr(os, "fdatasync", failing("fdatasync", OSError(errno.EIO, "Input/output error"), 0))
    writes = itertools.count()
    pwrite = os.pwrite

    def slow(*args: Any) -> int:
        next(writes)
        threading.Event().wait(0.01)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(copying, "UNIT_BYTES", 8)
    with pytest.raises(ShardconvError, match="Input/output error"):
        model.convert(tmp_path / "out")
    assert next(writes) < 60
