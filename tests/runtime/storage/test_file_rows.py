"""Rows of the tensors of a file, as a process of several reads them: their bytes, and no others."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from shardconv_runtime.format.header import ShardFile, read_header
from shardconv_runtime.format.slices import Range
from shardconv_runtime.storage import remote_shards
from shardconv_runtime.storage.pinned_reading import staged
from shardconv_runtime.storage.reading import mapped, with_rows
from shardconv_runtime.storage.remote_files import RangeReader, RemoteFile
from shardconv_runtime.storage.remote_shards import fetched
from test_reading import Host, assert_same
from torch import Tensor

SHAPES = {
    "long": (1000, 3),
    "wide": (3, 1000),
    "one": (1, 7),
    "flat": (13,),
    "empty": (0, 5),
    "no_bytes": (6, 0),
    "deep": (5, 2, 3),
}


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()} | {
        "half": torch.randn(9, 4).bfloat16(),
        "buffer": torch.arange(4),
    }


@pytest.fixture
def shard(tensors: dict[str, Tensor], tmp_path: Path) -> ShardFile:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return ShardFile(path, path.stat().st_size, read_header(path)[1])


def chunk(size: int, parts: int, part: int) -> Range:
    """As ``torch.chunk`` has it, which leaves the last parts empty where there are too few rows."""
    length = -(-size // parts)
    return min(part * length, size), min((part + 1) * length, size)


def chunks(tensors: dict[str, Tensor], parts: int, part: int) -> dict[str, Range]:
    return {n: chunk(t.shape[0], parts, part) for n, t in tensors.items() if n != "buffer"}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_rows_of_every_tensor(parts: int, tensors: dict[str, Tensor], shard: ShardFile) -> None:
    """Through buffers of a size that cuts some tensors, and from a mapping."""
    for part in range(parts):
        rows = chunks(tensors, parts, part)
        wanted = {n: t[slice(*rows[n])] if n in rows else t for n, t in tensors.items()}
        assert_same(dict(mapped(with_rows([shard], rows))), wanted)
        assert_same(dict(staged(with_rows([shard], rows), Host(), buffer_bytes=256)), wanted)


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_over_a_network(
    parts: int, tensors: dict[str, Tensor], shard: ShardFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small pieces, and a few ahead: the bytes of the rows, each asked for once."""
    monkeypatch.setattr(remote_shards, "PIECE_BYTES", 100)
    monkeypatch.setattr(remote_shards, "SLAB_BYTES", 300)
    monkeypatch.setattr(remote_shards, "AHEAD_BYTES", 1000)
    asked: list[Range] = []
    remote = replace(shard, path=MemoryFile(shard.path.read_bytes(), asked))
    for part in range(parts):
        rows = chunks(tensors, parts, part)
        wanted = {n: t[slice(*rows[n])] if n in rows else t for n, t in tensors.items()}
        asked.clear()
        assert_same(dict(fetched(with_rows([remote], rows))), wanted)
        assert sum(end - begin for begin, end in asked) == sum(t.nbytes for t in wanted.values())
        assert_same(dict(staged(with_rows([remote], rows), Host(), buffer_bytes=256)), wanted)


class MemoryFile(RemoteFile):
    """A file that is read as one on a network."""

    name = "model.safetensors"
    sha256 = identity = ""

    def __init__(self, data: bytes, asked: list[Range]) -> None:
        self.num_bytes = len(data)
        self.data = data
        self.asked = asked

    def reader(self) -> RangeReader:
        return MemoryReader(self)


class MemoryReader(RangeReader):
    _file: MemoryFile

    def request(self, offset: int, into: memoryview) -> tuple[int, Exception | None]:
        self._file.asked.append((offset, offset + len(into)))
        into[:] = self._file.data[offset : offset + len(into)]
        return len(into), None


def test_each_byte_is_read_once(
    tensors: dict[str, Tensor], shard: ShardFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Range] = []

    def watched(fd: int, views: list[memoryview], at: int, real: Any = os.preadv) -> int:
        count: int = real(fd, views, at)
        reads.append((at, at + count))
        return count

    monkeypatch.setattr(os, "preadv", watched)
    for part in range(4):
        whole = {"buffer": (0, tensors["buffer"].shape[0] if part == 0 else 0)}
        rows = chunks(tensors, 4, part) | whole
        dict(staged(with_rows([shard], rows), Host(), buffer_bytes=256))
    ends = [shard.start, *(end for _, end in sorted(reads))]
    assert [begin for begin, _ in sorted(reads)] == ends[:-1], "without a gap, and nothing twice"
    assert ends[-1] == shard.num_bytes


def test_a_mapping_ends_where_the_last_rows_end(tensors: dict[str, Tensor], shard: ShardFile) -> None:
    rows = chunks(tensors, 2, 0)
    (part,) = with_rows([shard], rows)
    last = next(reversed(part.tensors))
    assert part.start == shard.start
    assert part.num_bytes == shard.start + part.tensors[last].offsets[1]
