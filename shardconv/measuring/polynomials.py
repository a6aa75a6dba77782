"""From bytes at a few sizes to formulas: of the moments of a run, and of the tensors of a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from shardconv_runtime.format.measured import LiveBytes, moment_bytes

Points = Mapping[tuple[int, int], int]
"""(batch, length) -> bytes, for two batches and three lengths."""

_PROBES = tuple((batch, length) for batch in (1, 64) for length in (16, 128, 1024, 8192, 65536, 1 << 20))
"""Sizes at which some moment may need most."""


def largest_moments(runs: Mapping[tuple[int, int], Sequence[int]]) -> tuple[LiveBytes, ...]:
    """The moments of a run that need most at some size.

    Args:
        runs: (batch, length) -> bytes at each moment, for two batches and three lengths. Where the number of
            moments depends on the length (a loop over tokens), the largest ones are taken for one.
    """
    if len({len(run) for run in runs.values()}) > 1:
        runs = {size: (max(run, default=0),) for size, run in runs.items()}
    moments = dict.fromkeys(zip(*runs.values(), strict=True))
    formulas = [live_bytes(dict(zip(runs, values, strict=True))) for values in moments]
    if not formulas:
        return (LiveBytes((0, 0, 0)),)
    found = dict.fromkeys(max(formulas, key=lambda each: moment_bytes(each, *probe)) for probe in _PROBES)
    return tuple(found)


def live_bytes(points: Points) -> LiveBytes:
    """The polynomial through these points; bytes and bytes for each token are rounded up."""
    batches, lengths = (sorted({size[i] for size in points}) for i in range(2))
    low, high = batches
    each = {n: Fraction(points[high, n] - points[low, n], high - low) for n in lengths}
    other = {n: points[low, n] - low * each[n] for n in lengths}
    return LiveBytes(_quadratic(each), _quadratic(other))


def _quadratic(points: Mapping[int, Fraction]) -> tuple[int, int, int]:
    """Coefficients of 1, n and n * n through three points (Newton's form).

    A small fraction of n * n, as of code that pads to blocks, is not one of pairs of tokens: then the line
    through the outer points is taken.
    """
    (x, a), (y, b), (z, c) = sorted(points.items())
    slope = (b - a) / (y - x)
    square = round(((c - b) / (z - y) - slope) / (z - x))
    linear = (c - a) / (z - x) - square * (x + z)
    return math.ceil(a - linear * x - square * x * x), math.ceil(linear), square


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes of one tensor of a cache, by the number of tokens."""

    constant: int
    token_bytes: int
    window: int = 0
    """Tokens after which it does not grow; 0: it always does."""


def growth(short: tuple[int, int, int], long: tuple[int, int, int]) -> Growth:
    """The formula of a tensor.

    Args:
        short: a length, and the bytes of the tensor at this length and at one token more.
        long: the same beyond any window.
    """
    first, last = short[2] - short[1], long[2] - long[1]
    constant = short[1] - first * short[0]
    if first > 0 and last == 0:
        return Growth(constant, first, -(-(long[1] - constant) // first))
    if first == last and long[1] == constant + first * long[0]:
        return Growth(constant, first)
    mean = -(-(long[1] - short[1]) // (long[0] - short[0]))  # it grows by blocks
    return Growth(max(short[1] - mean * short[0], 0), mean)
