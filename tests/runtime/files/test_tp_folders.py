"""Folders of a repository for several numbers of ranks and stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardconv_runtime.errors import CheckpointError, NotConvertedError, SourceError
from shardconv_runtime.files.small_files import variant
from shardconv_runtime.files.tp_folders import (
    Folder,
    directories_for,
    folder_in,
    folders,
    nothing_for,
    only,
    stages_for,
)

STAGES = [f"pp-2-tp-4/stage-{k:05d}-of-00002/manifest.json" for k in (0, 1)]
OTHER = [f"pp-4-tp-2/stage-{k:05d}-of-00004/manifest.json" for k in range(4)]


def test_complete_folders_alone() -> None:
    assert folders(["tp-8/manifest.json", "tp-2/plan.json", *STAGES]) == [Folder(4, 2), Folder(8)]
    assert folders(STAGES[:1]) == []
    assert folders(["pp-1-tp-0/manifest.json", "tp-02/manifest.json", "xtp-2/manifest.json"]) == []


def test_stages_for_a_number_of_processes() -> None:
    names = [*STAGES, "tp-2/manifest.json"]
    assert stages_for("a/b", names, 8) == Folder(4, 2).parts
    assert stages_for("a/b", names, 4) == ()
    at_root = [name.partition("/")[2] for name in STAGES]
    assert stages_for("a/b", at_root, 6) == ("stage-00000-of-00002", "stage-00001-of-00002")
    with pytest.raises(CheckpointError, match="several models for 8 ranks, pp-2-tp-4, pp-4-tp-2; name one"):
        stages_for("a/b", [*STAGES, *OTHER], 8)


def test_directories_for_a_number_of_processes() -> None:
    plain = ["tp-2/manifest.json", "config.json"]
    assert directories_for("here", [*plain, "manifest.json"], 2) == ("",)
    assert directories_for("here", [*plain, *STAGES], 2) == ("tp-2",)
    assert directories_for("here", [*plain, *STAGES], 8) == Folder(4, 2).parts
    assert directories_for("here", ["config.json"], 2) == ()  # an ordinary model
    for names in (plain, []):
        with pytest.raises(NotConvertedError, match="here holds no converted model for 4 ranks"):
            directories_for("here", names, 4)


def test_the_only_one() -> None:
    assert only("a/b", STAGES) == Folder(4, 2).parts
    assert only("a/b", [name.partition("/")[2] for name in STAGES])[1] == "stage-00001-of-00002"
    with pytest.raises(SourceError, match="several converted models, pp-4-tp-2, pp-2-tp-4; choose"):
        only("a/b", [*STAGES, *OTHER])
    with pytest.raises(SourceError, match="no converted model"):
        only("a/b", STAGES[:1])
    assert "but for 8 (2 stages); start as many" in nothing_for("a/b", STAGES, 2)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a/b", ("a/b", None)),
        ("a/b/tp-8", ("a/b", Folder(8))),
        ("a/b/pp-2-tp-8", ("a/b", Folder(8, 2))),
        ("a/tp-8", ("a/tp-8", None)),
        ("a/b/c", ("a/b/c", None)),
    ],
)
def test_a_folder_behind_the_id(text: str, found: tuple[str, Folder | None]) -> None:
    assert folder_in(text) == found


def test_variants_beside_each_other(tmp_path: Path) -> None:
    for name in (*STAGES, "tp-2/manifest.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert variant(tmp_path, 8) == tmp_path / "pp-2-tp-4"
    assert variant(tmp_path, 2) == tmp_path / "tp-2"
    assert variant(tmp_path, 3) == tmp_path
    (tmp_path / "pp-4-tp-2").mkdir()
    with pytest.raises(CheckpointError, match="several models for 8 ranks"):
        variant(tmp_path, 8)
