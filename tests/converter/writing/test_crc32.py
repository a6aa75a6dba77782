"""The checksum of a file from those of its parts."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardconv.writing.crc32 import Extent, combine, join


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_stretches(first: bytes, second: bytes) -> None:
    found = combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert found == zlib.crc32(first + second)


@pytest.mark.parametrize("num_bytes", [0, 1, 2**16 - 1, 2**16, 10**6 + 7])
def test_long_stretches(num_bytes: int) -> None:
    first, second = b"shardconv", random.Random(0).randbytes(num_bytes)
    assert combine(zlib.crc32(first), zlib.crc32(second), num_bytes) == zlib.crc32(first + second)


def test_lengths_that_no_memory_holds() -> None:
    """A terabyte of zeros, in halves and in other parts."""
    crcs = {10: zlib.crc32(bytes(1 << 10))}
    for power in range(10, 40):
        crcs[power + 1] = combine(crcs[power], crcs[power], 1 << power)
    crc, num_bytes = zlib.crc32(b"x"), 0
    for power in (10, *range(10, 40)):  # 1 kB, and 1 kB + 2 kB + ... + half a terabyte
        crc, num_bytes = combine(crc, crcs[power], 1 << power), num_bytes + (1 << power)
    assert num_bytes == 1 << 40
    assert crc == combine(zlib.crc32(b"x"), crcs[40], 1 << 40)


@settings(max_examples=200)
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=12), st.randoms())
def test_parts_in_any_order(data: bytes, cuts: list[int], shuffle: random.Random) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [(a, data[a:b]) for a, b in itertools.pairwise(edges)]
    extents = [Extent(offset, len(part), zlib.crc32(part)) for offset, part in parts]
    shuffle.shuffle(extents)
    merged = (Extent(0, len(data), zlib.crc32(data)),) if data else ()
    assert join(extents) == merged
    middle = len(extents) // 2
    assert join([*join(extents[:middle]), *join(extents[middle:])]) == merged


def test_gaps_stay() -> None:
    extents = [Extent(20, 5, 1), Extent(0, 5, 2), Extent(10, 5, 3)]
    assert join(extents) == tuple(sorted(extents))


def test_stretches_that_overlap_are_an_error() -> None:
    with pytest.raises(ValueError, match="bytes at 4 were written twice"):
        join([Extent(4, 2, 0), Extent(0, 5, 0)])
    with pytest.raises(ValueError, match="bytes at 0 were written twice"):
        join([Extent(0, 5, 0), Extent(0, 5, 0)])
