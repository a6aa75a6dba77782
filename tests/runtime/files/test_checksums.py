"""Checksums of files: of shards from pieces, which several threads read."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
from shardconv_runtime.files import checksums as module
from shardconv_runtime.files.checksums import checksums, of_pieces, shard_checksum
from shardconv_runtime.files.manifest import FileEntry, sha256_checksum


def of_bytes(data: bytes, piece: int) -> str:
    """As ``docs/plan-format.md`` has it."""
    values = [zlib.crc32(data[start : start + piece]) for start in range(0, len(data), piece)]
    return f"crc32-of-pieces:{zlib.crc32(b''.join(value.to_bytes(4, 'little') for value in values)):08x}"


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
def test_they_are_those_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    monkeypatch.setattr(module, "READ_BYTES", 3)
    files = {}
    for size in (0, 1, 7, 700):
        data = random.Random(size).randbytes(size)
        path = tmp_path / str(size)
        path.write_bytes(data)
        files[FileEntry(str(size), size, of_bytes(data, piece))] = path
        assert shard_checksum(path) == of_bytes(data, piece)
        files[FileEntry(f"{size}.txt", size, sha256_checksum(path))] = path
    done: list[int] = []
    assert checksums(files, done.append) == {entry: entry.checksum for entry in files}
    assert sum(done) == 2 * 708


def test_a_file_of_several_pieces(tmp_path: Path) -> None:
    """Of 32 MiB each, which is part of the format."""
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.seek((1 << 25) + 2)
        file.write(b"x")
    assert shard_checksum(path) == of_pieces([zlib.crc32(bytes(1 << 25)), zlib.crc32(b"\0\0x")])


def test_pieces_that_change_places_are_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4)
    assert len({shard_checksum(_written(tmp_path, data)) for data in (b"aaaabbbb", b"bbbbaaaa")}) == 2


def _written(directory: Path, data: bytes) -> Path:
    path = directory / data.hex()
    path.write_bytes(data)
    return path


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    files = {
        FileEntry("short", 4, "crc32-of-pieces:00000000"): tmp_path / "short",
        FileEntry("absent", 4, "crc32-of-pieces:00000000"): tmp_path / "absent",
        FileEntry("absent.txt", 4, "sha256:" + 64 * "0"): tmp_path / "absent",
    }
    assert [str(error) for error in checksums(files).values()] == [
        "ends at byte 3: it was cut off while it was read",
        "cannot be read (No such file or directory)",
        "cannot be read (No such file or directory)",
    ]
