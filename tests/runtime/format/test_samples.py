"""Checksums of some blocks: the same for the same bytes, others for other ones, and few bytes are read."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
from shardconv_runtime.errors import CheckpointError
from shardconv_runtime.files.shard_files import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    check_sample,
    sample_checksum,
)

SAMPLED = NUM_BLOCKS * BLOCK_BYTES


def write(path: Path, num_bytes: int, seed: int = 0) -> Path:
    path.write_bytes(random.Random(seed).randbytes(num_bytes))
    return path


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 10, SAMPLED // 2, SAMPLED])
def test_short_files_are_read_in_full(tmp_path: Path, num_bytes: int) -> None:
    file = write(tmp_path / "x", num_bytes)
    assert sample_checksum(file) == f"crc32:{zlib.crc32(file.read_bytes()):08x}"


@pytest.mark.parametrize("num_bytes", [SAMPLED + 1, 3 * SAMPLED + 17])
def test_other_bytes_have_another_checksum(tmp_path: Path, num_bytes: int) -> None:
    file, other = write(tmp_path / "x", num_bytes), write(tmp_path / "y", num_bytes, seed=1)
    check_sample(file, sample_checksum(file))
    with pytest.raises(CheckpointError, match="not the file that was written"):
        check_sample(other, sample_checksum(file))


@pytest.mark.parametrize("position", [0, -1])
def test_the_ends_are_among_the_blocks(tmp_path: Path, position: int) -> None:
    file = write(tmp_path / "x", 3 * SAMPLED)
    before = sample_checksum(file)
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
    assert sample_checksum(file) != before


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_sample(tmp_path / "x", "crc32:00000000")
