"""A journal of what was written: lines ``CRC [file, [leaf, element], [[offset, bytes, crc32], ...]]``.

A line is appended once the bytes that it names are durable. It begins with its own CRC-32, as eight
hexadecimal digits: from the first one that does not have it, everything is ignored.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from .crc32 import Extent

Key = tuple[int, int]
"""Of a unit of ``copying``."""

HEADER: Key = (-1, 0)
"""Stands for the header of a file."""

_FORGET: Key = (-2, 0)
"""Everything about the file that was said before does not hold."""

_CRC_LENGTH = 9
"""Of the digits and the space."""

Written = dict[Key, tuple[Extent, ...]]
"""What each unit put into one file."""


def read_log(path: Path) -> dict[int, Written]:
    """What the journal says of each file, by its index."""
    found: dict[int, Written] = {}
    if path.is_file():
        for line in _lines(path.read_bytes()):
            index, key, extents = json.loads(line[_CRC_LENGTH:])
            if tuple(key) == _FORGET:
                found.pop(index, None)
            else:
                found.setdefault(index, {})[tuple(key)] = tuple(Extent(*extent) for extent in extents)
    return found


def append_line(handle: int, index: int, key: Key, extents: Sequence[Extent]) -> None:
    """Append to an open journal."""
    text = json.dumps([index, key, [list(extent) for extent in extents]], separators=(",", ":")).encode()
    data = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
    while len(data):
        data = data[os.write(handle, data) :]


def forget(handle: int, index: int) -> None:
    """Void what the journal says of a file."""
    append_line(handle, index, _FORGET, ())


def truncate_torn(handle: int) -> None:
    """Cut off what a crash left of a line at the end."""
    num_bytes = os.fstat(handle).st_size
    data = os.pread(handle, num_bytes, 0)
    os.ftruncate(handle, sum(len(line) + 1 for line in _lines(data)))


def _lines(data: bytes) -> list[bytes]:
    """The lines up to the first that is not as it was written."""
    good = []
    for line in data.split(b"\n")[:-1]:
        if line[:_CRC_LENGTH] != b"%08x " % zlib.crc32(line[_CRC_LENGTH:]):
            break
        good.append(line)
    return good
