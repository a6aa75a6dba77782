"""A directory appears only once it is complete, whenever a run dies."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from shardconv_runtime.comm.mesh import Launch
from shardconv_runtime.errors import CheckpointError, ShardconvError
from shardconv_runtime.saving.replicas import Replicas, Staging, begin

ALONE = Replicas(Launch(0, 1, torch.device("cpu")), 0, True)


def contents(directory: Path) -> Collection[str]:
    if not (directory / "whole").exists():
        raise CheckpointError("it is something else")
    return {"whole", "below/data"}


def start(out: Path, *, overwrite: bool = False, text: str = "new") -> Staging:
    staging = begin(ALONE, out, overwrite=overwrite, known=contents)
    (staging.path / "below").mkdir()
    (staging.path / "below" / "data").write_text(text)
    (staging.path / "whole").touch()
    return staging


def state(out: Path) -> str | None:
    return (out / "below" / "data").read_text() if (out / "whole").exists() else None


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "some" / "out"


def test_it_is_there_at_once(out: Path) -> None:
    staging = start(out)
    assert not out.exists()
    staging.commit()
    assert state(out) == "new"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_empty_directory_is_taken(out: Path) -> None:
    out.mkdir(parents=True)
    start(out).commit()
    assert state(out) == "new"


def test_one_is_replaced(out: Path) -> None:
    start(out, text="old").commit()
    staging = start(out, overwrite=True)
    assert state(out) == "old"
    staging.commit()
    assert state(out) == "new"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_run_that_died_while_it_wrote(out: Path) -> None:
    start(out, text="dead")
    start(out).commit()
    assert state(out) == "new"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_run_that_died_between_two_renames(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(out, text="old").commit()
    staging = start(out, overwrite=True, text="dead")
    rename = Path.rename

    def dies(self: Path, target: Path) -> Path:
        if self == staging.path:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        staging.commit()
    monkeypatch.undo()
    assert not out.exists()
    with pytest.raises(ShardconvError, match="is not empty"):
        start(out)
    assert state(out) == "old"
    assert [path.name for path in out.parent.iterdir() if "replaced" in path.name] == []


def test_a_rename_that_fails(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(out, text="old").commit()
    staging = start(out, overwrite=True)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self == staging.path:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="No space"):
        staging.commit()
    assert state(out) == "old"


@pytest.mark.parametrize(
    ("name", "overwrite", "text"),
    [
        ("file", True, "is a file; name a directory"),
        ("full", False, "is not empty; name another directory, or pass overwrite=True"),
        ("full", True, "holds mine, which shardconv did not write"),
        ("other", True, "cannot be replaced: it is something else"),
        ("file/below", False, "cannot be made: "),
        ("source/below", True, "one contains the other"),
        ("", True, "one contains the other"),
    ],
)
def test_what_is_refused(name: str, overwrite: bool, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    start(tmp_path / "full").commit()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    (tmp_path / "source").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ShardconvError, match=text):
        begin(
            ALONE,
            tmp_path / name,
            overwrite=overwrite,
            known=contents,
            apart_from=tmp_path / "source",
        )
    assert sorted(tmp_path.rglob("*")) == before
