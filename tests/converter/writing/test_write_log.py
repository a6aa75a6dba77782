"""The journal: what a crash tears, cuts or overwrites is not believed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardconv.writing.crc32 import Extent
from shardconv.writing.workspace import HEADER, Written, append_line, forget, read_log, truncate_incomplete

SAID: list[tuple[int, tuple[int, int], tuple[Extent, ...]]] = [
    (0, HEADER, (Extent(0, 80, 0xFFFFFFFF),)),
    (1, HEADER, (Extent(0, 64, 7),)),
    (0, (3, 0), (Extent(80, 100, 1), Extent(300, 5, 0))),
    (1, (3, 0), (Extent(64, 1, 2),)),
    (0, (3, 1 << 40), (Extent(1 << 50, 1 << 30, 3),)),
]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[int]:
    """An open journal, ``journal`` in the directory."""
    handle = os.open(tmp_path / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield handle
    os.close(handle)


def say(handle: int, count: int = len(SAID)) -> None:
    """Write the first lines."""
    for index, key, extents in SAID[:count]:
        append_line(handle, index, key, extents)


def after(count: int) -> dict[int, Written]:
    """What the first lines say."""
    found: dict[int, Written] = {}
    for index, key, extents in SAID[:count]:
        found.setdefault(index, {})[key] = extents
    return found


def test_lines_are_read_back(tmp_path: Path, journal: int) -> None:
    assert read_log(tmp_path / "absent") == {}
    for count in range(len(SAID) + 1):
        os.ftruncate(journal, 0)
        say(journal, count)
        assert read_log(tmp_path / "journal") == after(count)


def test_a_unit_that_is_done_again_counts_once(tmp_path: Path, journal: int) -> None:
    append_line(journal, 0, (1, 2), [Extent(0, 1, 1)])
    append_line(journal, 0, (1, 2), [Extent(0, 1, 9)])
    assert read_log(tmp_path / "journal") == {0: {(1, 2): (Extent(0, 1, 9),)}}


def test_a_file_can_be_begun_again(tmp_path: Path, journal: int) -> None:
    say(journal)
    forget(journal, 0)
    assert read_log(tmp_path / "journal") == {1: after(len(SAID))[1]}
    append_line(journal, 0, HEADER, [Extent(0, 8, 8)])
    assert read_log(tmp_path / "journal")[0] == {HEADER: (Extent(0, 8, 8),)}


def lines_before(data: bytes, place: int) -> int:
    """How many lines end before a byte."""
    return data[:place].count(b"\n")


def test_every_cut(tmp_path: Path, journal: int) -> None:
    path = tmp_path / "journal"
    say(journal)
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        num_lines = lines_before(data, length)
        assert read_log(path) == after(num_lines)
        truncate_incomplete(journal)
        assert path.read_bytes() == b"".join(data.splitlines(True)[:num_lines])
        append_line(journal, 5, HEADER, [])
        assert read_log(path) == {**after(num_lines), 5: {HEADER: ()}}


def test_every_byte_that_is_overwritten(tmp_path: Path, journal: int) -> None:
    path = tmp_path / "journal"
    say(journal)
    data = path.read_bytes()
    for place in range(len(data)):
        for value in {0, data[place] ^ 1, ord("\n"), ord("1"), 0xFF} - {data[place]}:
            path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            assert read_log(path) == after(lines_before(data, place)), (place, value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(SAID)))
def test_garbage_at_the_end(tmp_path: Path, journal: int, garbage: bytes, count: int) -> None:
    path = tmp_path / "journal"
    os.ftruncate(journal, 0)
    say(journal, count)
    os.write(journal, garbage)
    assert read_log(path) == after(count)
    truncate_incomplete(journal)
    assert read_log(path) == after(count)
    forget(journal, 0)
    assert read_log(path) == {index: log for index, log in after(count).items() if index}


@pytest.mark.parametrize(
    "garbage", [b"{}\n", b"[]\n", b"5\n", b"[0, [1], 2]\n", b"\n", b"null\n", bytes(4096)]
)
def test_what_another_program_might_have_written(tmp_path: Path, journal: int, garbage: bytes) -> None:
    os.write(journal, garbage)
    say(journal)
    assert read_log(tmp_path / "journal") == {}


def test_a_short_write_is_continued(tmp_path: Path, journal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write, chance = os.write, random.Random(0)
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[: chance.randint(1, 9)]))
    say(journal)
    assert read_log(tmp_path / "journal") == after(len(SAID))
