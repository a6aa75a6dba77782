"""Conversions that are killed, starved, or run into each other: said in one line, and nothing is lost.

``scripts/faults`` does the same at many more moments.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from interrupted import (
    CONTINUES,
    Conversion,
    Ended,
    digests,
    ended,
    looks_complete,
    placed,
    save_large,
    send,
)

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several files."""
    return save_large(tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    """What a conversion for 4 ranks gives that nothing disturbs."""
    conversion = Conversion(model, model.parent / "expected", ("-q", "--tp", "4"))
    assert conversion.run() == Ended(0, "")
    found = digests(conversion.out)
    shutil.rmtree(conversion.out)
    return found


def refused(result: Ended, text: str) -> bool:
    """Whether it was refused in one line that says so."""
    assert result.code in (3, 5), result
    assert result.errors.startswith("error: "), result
    assert result.errors.count("\n") == 1, result
    assert text in result.errors, result
    return True


def test_each_way_to_die_can_be_continued(model: Path, expected: dict[str, str], tmp_path: Path) -> None:
    conversion = Conversion(model, tmp_path / "out", ("-q", "--tp", "4"))
    assert send(conversion.begin(), signal.SIGKILL).code == -signal.SIGKILL
    assert not placed(conversion.out)
    shutil.rmtree(conversion.out)  # or little may be left to interrupt
    assert send(conversion.begin(), signal.SIGINT) == Ended(130, CONTINUES)
    assert not placed(conversion.out)
    shutil.rmtree(conversion.out / ".partial" / "rank-00001-of-00004", ignore_errors=True)
    starved = conversion.run(max_file_bytes=10_000_000)
    assert refused(starved, "cannot be written: File too large; correct that and run the same command again")
    assert not placed(conversion.out)
    assert conversion.run() == Ended(0, "")
    assert digests(conversion.out) == expected


def test_one_directory_has_one_writer_and_one_source(
    model: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    conversion = Conversion(copy, tmp_path / "out", ("-q", "--tp", "4"))
    first = conversion.begin()
    assert refused(conversion.run(), "is being written by another process; wait for it, or name another")
    source = sorted(copy.glob("*.safetensors"))[-1]
    os.truncate(source, 1000)
    first.send_signal(signal.SIGCONT)
    broken = ended(first)
    assert refused(broken, f"{source} ends ")
    assert refused(broken, "it was cut off since its header was read; download or copy it again")
    assert not placed(conversion.out)
    shutil.copyfile(model / source.name, source)
    conversion.options = ("--tp", "4")
    result = conversion.run()
    assert result.code == 0
    (said,) = [line for line in result.errors.splitlines() if "is discarded" in line]
    assert said.startswith(f"source.files.{source.name} was ")
    assert said.endswith(f": the unfinished output in {conversion.out} is discarded")
    assert digests(conversion.out) == expected


def test_parts(model: Path, expected: dict[str, str], tmp_path: Path) -> None:
    """At the same time; one dies and is run again."""
    part = Conversion(model, tmp_path / "out", ("-q", "--tp", "4", "--ranks"))
    dies = part.begin("1-2")
    others = [part.start(ranks) for ranks in ("0", "3")]
    assert refused(part.run("2-3"), "is being written by another process")
    assert [ended(process) for process in others] == [Ended(0, ""), Ended(0, "")]
    assert not looks_complete(part.out)
    assert refused(
        part.run("0", "--dtype", "float32"), "holds parts of another conversion (dtype was bfloat16"
    )
    assert send(dies, signal.SIGKILL).code == -signal.SIGKILL
    assert not looks_complete(part.out)
    assert part.run("1-2") == Ended(0, "")
    assert digests(part.out) == expected
