"""The shard files of a plan, whose layout is known before anything is written.

A safetensors file is its header and its tensors at offsets that follow from names, dtypes and shapes, so
that its parts can be written in any order.
The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..errors import DamagedError
from ..format.fused_groups import adjacent_tensors, in_units
from ..format.header import STORED_NAME, item_bytes, stored_shape
from ..format.plan import Plan, local_shape
from ..format.stored_layout import is_common, layout_sha256, stored_plans
from ..storage.file_access import WeightFile, is_local
from .manifest import shard_metadata, shard_path

if TYPE_CHECKING:  # it imports the client of the Hub
    from ..storage.remote_files import RemoteFile

ALIGNMENT = 64
"""Tensors begin at a multiple of this many bytes, a cache line where they are mapped: headers are padded with
spaces."""

MAX_FILE_SIZE = 5 * 10**9
"""Bytes after which a new shard file is begun."""

Key = TypeVar("Key")

_LENGTH_BYTES = 8
"""Bytes of the length of the header, with which a file begins."""

assert sys.byteorder == "little", "safetensors files are little endian"


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Header and offsets of a safetensors file."""

    header: bytes
    offsets: Mapping[str, int]
    """The byte at which each tensor begins, in the order of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A shard file that is to be written."""

    path: str
    """Relative to the converted directory, with ``/``."""
    rank: int | None
    """The rank that owns it; None for ``common/``, which all ranks own."""
    layout: FileLayout


def shard_files(plan: Plan, ranks: Iterable[int | None], max_file_size: int) -> Iterator[PlannedShard]:
    """Yield the files of some ranks; the same plan and size give the same bytes."""
    entries = stored_plans(plan)
    layout, adjacent = layout_sha256(plan), adjacent_tensors(plan)
    for rank in ranks:
        by_owner = {
            name: (entry.dtype, local_shape(entry, plan.mesh, rank or 0))
            for name, entry in entries.items()
            if is_common(entry) == (rank is None)
        }
        sizes = {name: math.prod(shape) * item_bytes(dtype) for name, (dtype, shape) in by_owner.items()}
        units = {unit: sum(sizes[name] for name in unit) for unit in in_units(sizes, adjacent)}
        parts = grouped(units, max_file_size)
        for index, part in enumerate(parts):
            declared = {name: by_owner[name] for unit in part for name in unit}
            path = shard_path(rank, plan.tp, index, len(parts))
            yield PlannedShard(path, rank, lay_out(declared, shard_metadata(rank, plan.tp, layout)))


def lay_out(
    declared: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    alignment: int = ALIGNMENT,
) -> FileLayout:
    """Lay out a file; the same arguments give the same bytes.

    Args:
        declared: torch's name of the dtype and the shape of each tensor; wider dtypes go first, which
            keeps all aligned.
        alignment: the alignment of the first tensor, in bytes.
    """
    ordered = sorted(declared.items(), key=lambda item: -item_bytes(item[1][0]))
    fields: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    begins, end = [], 0
    for name, (dtype, shape) in ordered:
        begin, end = end, end + math.prod(shape) * item_bytes(dtype)
        begins.append(begin)
        extents = stored_shape(dtype, shape)
        fields[name] = {"dtype": STORED_NAME[dtype], "shape": extents, "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: len(header) + begin for (name, _), begin in zip(ordered, begins, strict=True)}
    return FileLayout(header, offsets, len(header) + end)


def grouped(num_bytes: Mapping[Key, int], limit: int) -> list[list[Key]]:
    """Return groups of consecutive keys of at most ``limit`` bytes each; a larger one is a group."""
    parts: list[list[Key]] = []
    group_bytes = 0
    for key, size in num_bytes.items():
        if not parts or group_bytes + size > limit:
            parts.append([])
            group_bytes = 0
        parts[-1].append(key)
        group_bytes += size
    return parts


# Checksums of a few blocks of a shard: files of another conversion are noticed without reading all of them.
#
# Names, sizes and headers are equal in two conversions of one architecture, such as a model and a fine-tuned
# one. Blocks all over the file are not.


NUM_THREADS = 16
"""Blocks of a file on a network that are read at once."""

NUM_BLOCKS, BLOCK_BYTES = 64, 4096
"""Blocks of a file; a file that is not longer than all of these is read in full."""


def sample_checksum(path: str | os.PathLike[str]) -> str:
    """Return ``crc32:`` and 8 hex digits of equally distant blocks, from the first to the last of a file."""
    with open(path, "rb", buffering=0) as file:
        value = 0
        for begin, end in sampled_blocks(os.fstat(file.fileno()).st_size):
            file.seek(begin)
            value = zlib.crc32(file.read(end - begin), value)
    return f"crc32:{value:08x}"


def sampled_blocks(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte of each block and the one after its last."""
    last, end = max(0, num_bytes - BLOCK_BYTES), 0
    for start in dict.fromkeys(last * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)):
        begin = max(start, end)  # blocks of a short file overlap
        end = min(start + BLOCK_BYTES, num_bytes)
        yield begin, end


def _remote_sample(file: RemoteFile) -> str:
    """Return the same checksum of a file that is read over a network."""
    reader, value = file.reader(), 0
    with ThreadPoolExecutor(NUM_THREADS, "sample") as pool:
        blocks = ((begin, end - begin) for begin, end in sampled_blocks(file.num_bytes))
        for data in pool.map(reader.read, *zip(*blocks, strict=True)):
            value = zlib.crc32(data, value)
    return f"crc32:{value:08x}"


def check_sample(path: WeightFile, sample: str) -> None:
    """Check the blocks of a shard."""
    try:
        checksum = sample_checksum(path) if is_local(path) else _remote_sample(path)
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read ({error.strerror})") from error
    if checksum != sample:
        raise DamagedError(
            f"{path} is damaged, or is not the file that was written: a checksum of some of its blocks is "
            f"{checksum}, and {sample} in the manifest; copy the directory again, or convert the model again"
        )
