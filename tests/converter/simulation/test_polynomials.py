"""Formulas through a few points."""

from __future__ import annotations

import pytest
from shardconv_runtime.format.measured import LiveBytes, moment_bytes

from shardconv.simulation.memory_measurement import Growth, growth, largest_moments, live_bytes

SIZES = [(batch, length) for batch in (1, 2) for length in (100, 200, 400)]


FORMULAS = (LiveBytes((5, 7, 2), (1, 0, 3)), LiveBytes((-9, 12, 0)), LiveBytes((0, 0, 0)))


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_polynomial_is_found(formula: LiveBytes) -> None:
    points = {size: moment_bytes(formula, *size) for size in SIZES}
    assert live_bytes(points) == formula


def test_blocks_are_no_pairs_of_tokens() -> None:
    """Padding to blocks bends the line a little."""
    points = {(b, n): b * 10 * (-(-n // 64) * 64) for b, n in SIZES}
    found = live_bytes(points)
    assert found.sequence[2] == 0
    assert all(abs(moment_bytes(found, *size) / points[size] - 1) < 0.25 for size in SIZES)


def test_moments_that_are_never_largest_are_left_out() -> None:
    short, long, never = LiveBytes((10_000, 1, 0)), LiveBytes((0, 50, 0)), LiveBytes((0, 3, 0))
    runs = {size: [moment_bytes(m, *size) for m in (short, never, long)] for size in SIZES}
    assert set(largest_moments(runs)) == {short, long}


def test_runs_of_unequal_lengths_have_one_moment() -> None:
    runs = {(b, n): [0] * n + [b * n] for b, n in SIZES}
    assert largest_moments(runs) == (LiveBytes((0, 1, 0)),)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (lambda n: 40, Growth(40, 0)),
        (lambda n: 8 * n, Growth(0, 8)),
        (lambda n: 8 * n + 24, Growth(24, 8)),
        (lambda n: 8 * min(n, 16), Growth(0, 8, 16)),
        (lambda n: 8 * min(n, 16) + 5, Growth(5, 8, 16)),
        (lambda n: 8 * (n // 4), Growth(0, 2)),
    ],
)
def test_how_a_tensor_of_a_cache_grows(num_bytes: object, expected: Growth) -> None:
    assert callable(num_bytes)
    short, long = ((n, num_bytes(n), num_bytes(n + 1)) for n in (8, 4096))
    assert growth(short, long) == expected
