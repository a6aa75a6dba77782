"""A journal of writes: lines ``CRC [file, [leaf, element], [[offset, bytes, crc32], ...]]``.

A line is appended once the bytes that it names are durable. It begins with its own CRC-32, as eight
hexadecimal digits; everything from the first line whose CRC is wrong is ignored.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from .crc32 import Extent

UnitKey = tuple[int, int]
"""The key of a unit of ``copying``."""

HEADER: UnitKey = (-1, 0)
"""The key of a file's header."""

_FORGET: UnitKey = (-2, 0)
"""The key of a line that voids all earlier ones about its file."""

_CRC_LENGTH = 9
"""Of the digits and the space."""

Written = dict[UnitKey, tuple[Extent, ...]]
"""Unit -> the extents that it wrote to one file."""


def read_log(path: Path) -> dict[int, Written]:
    """Index of a file -> the writes to it that are durable."""
    found: dict[int, Written] = {}
    if path.is_file():
        for line in _lines(path.read_bytes()):
            index, key, extents = json.loads(line[_CRC_LENGTH:])
            if tuple(key) == _FORGET:
                found.pop(index, None)
            else:
                found.setdefault(index, {})[tuple(key)] = tuple(Extent(*extent) for extent in extents)
    return found


def append_line(handle: int, index: int, key: UnitKey, extents: Sequence[Extent]) -> None:
    """Append a line to an open journal."""
    text = json.dumps([index, key, [list(extent) for extent in extents]], separators=(",", ":")).encode()
    data = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
    while len(data):
        data = data[os.write(handle, data) :]


def forget(handle: int, index: int) -> None:
    """Void all earlier lines about a file."""
    append_line(handle, index, _FORGET, ())


def truncate_incomplete(handle: int) -> None:
    """Remove the incomplete line that a crash may have left at the end."""
    num_bytes = os.fstat(handle).st_size
    data = os.pread(handle, num_bytes, 0)
    os.ftruncate(handle, sum(len(line) + 1 for line in _lines(data)))


def _lines(data: bytes) -> list[bytes]:
    """The lines before the first whose CRC is wrong."""
    good = []
    for line in data.split(b"\n")[:-1]:
        if line[:_CRC_LENGTH] != b"%08x " % zlib.crc32(line[_CRC_LENGTH:]):
            break
        good.append(line)
    return good
