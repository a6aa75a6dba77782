"""Writes numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence


def human_bytes(num_bytes: float) -> str:
    """Return bytes with three or four digits, such as ``16.8 MB`` (decimal units)."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def human_count(count: float) -> str:
    """Return a number of parameters, such as ``405.9 B``."""
    return _scaled(count, ("", "k", "M", "B", "T"))


def _scaled(value: float, units: Sequence[str]) -> str:
    unit = 0
    while value >= 999.95 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    number = f"{value:.0f}" if unit == 0 else f"{value:.1f}"
    return f"{number} {units[unit]}".rstrip()


def percent(part: int, total: int) -> str:
    """Return a share with two decimals; 0% and 100% only where that is exact."""
    if total == 0:
        return "0%"
    percent = 100 * part / total
    if 0 < percent < 0.01:
        return "less than 0.01%"
    if percent < 100 and f"{percent:.2f}" == "100.00":
        return "more than 99.99%"
    return f"{percent:.2f}%"
