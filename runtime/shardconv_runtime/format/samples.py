"""Checksums of a few blocks of a shard: files of another conversion are noticed without reading all of them.

Names, sizes and headers are equal in two conversions of one architecture, such as a model and a fine-tuned
one. Blocks all over the file are not.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from ..errors import CheckpointError

NUM_BLOCKS, BLOCK_BYTES = 64, 4096
"""Of a file: read in full if it is not longer than all of these."""


def sample_checksum(path: str | os.PathLike[str]) -> str:
    """``crc32:`` and 8 hex digits: of blocks at equal distances, from the first to the last of the file."""
    with open(path, "rb", buffering=0) as file:
        last = max(0, os.fstat(file.fileno()).st_size - BLOCK_BYTES)
        starts = dict.fromkeys(last * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS))
        value, end = 0, 0
        for start in starts:
            begin = max(start, end)  # blocks of a short file overlap
            end = start + BLOCK_BYTES
            file.seek(begin)
            value = zlib.crc32(file.read(end - begin), value)
    return f"crc32:{value:08x}"


def check_sample(path: Path, sample: str) -> None:
    """Check the blocks of a shard.

    Raises:
        CheckpointError: they have other bytes than were written, or the file cannot be read.
    """
    try:
        found = sample_checksum(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if found != sample:
        raise CheckpointError(
            f"{path} is not the file that was written: a checksum of some of its blocks is {found}, and "
            f"{sample} in the manifest; copy the directory again, or convert the model again"
        )
