"""Computes the CRC-32 of a file from the CRC-32s of its parts, which may be computed in any order.

``zlib.crc32`` computes the checksum of one range of bytes; this combines two. Appending n zero bytes to a
message is a linear map of its CRC over GF(2). The CRC of ``a + b`` is the CRC of ``a`` mapped over
``len(b)`` zero bytes, xor the CRC of ``b`` (zlib's ``crc32_combine``, by Mark Adler).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32, least significant bit first."""

_Matrix = tuple[int, ...]
"""Images of the 32 unit vectors."""


class Extent(NamedTuple):
    """A range of bytes of a file that was written."""

    offset: int
    """Offset of the first byte in the file."""
    num_bytes: int
    crc32: int


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two ranges of bytes, one after the other.

    Args:
        first: CRC-32 of the first.
        second: CRC-32 of the second.
        second_bytes: length of the second.
    """
    return _times(_zero_bytes_matrix(second_bytes), first) ^ second


def join(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Return the same ranges in order, with adjacent ones merged.

    Raises:
        ValueError: if two overlap.
    """
    joined: list[Extent] = []
    for extent in sorted(extents):
        if joined and extent.offset < joined[-1].offset + joined[-1].num_bytes:
            raise ValueError(f"bytes at {extent.offset} were written twice")
        if joined and extent.offset == joined[-1].offset + joined[-1].num_bytes:
            last = joined[-1]
            crc = combine(last.crc32, extent.crc32, extent.num_bytes)
            joined[-1] = Extent(last.offset, last.num_bytes + extent.num_bytes, crc)
        else:
            joined.append(extent)
    return tuple(joined)


@lru_cache(maxsize=4096)
def _zero_bytes_matrix(num_bytes: int) -> _Matrix:
    """Return the map that appending ``num_bytes`` zero bytes applies to a CRC."""
    result = tuple(1 << exponent for exponent in range(32))
    power = 0
    while num_bytes:
        if num_bytes & 1:
            result = _compose(_power_matrix(power), result)
        num_bytes >>= 1
        power += 1
    return result


@lru_cache(maxsize=64)
def _power_matrix(power: int) -> _Matrix:
    """Return the map of ``2 ** power`` zero bytes."""
    if power > 0:
        half = _power_matrix(power - 1)
        return _compose(half, half)
    matrix = (_POLYNOMIAL, *(1 << exponent for exponent in range(31)))  # one zero digit
    for _ in range(3):
        matrix = _compose(matrix, matrix)
    return matrix


def _compose(outer: _Matrix, inner: _Matrix) -> _Matrix:
    return tuple(_times(outer, column) for column in inner)


def _times(matrix: _Matrix, vector: int) -> int:
    total, index = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[index]
        vector >>= 1
        index += 1
    return total
