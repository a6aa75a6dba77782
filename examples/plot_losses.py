#!/usr/bin/env python3
"""Draws losses that ``train.py`` wrote as an SVG, and how far curves are from the first one.

    python examples/plot_losses.py curve.svg "one process=unsharded.jsonl" "tp 2 x dp 2=tp2-dp2.jsonl"

It also prints the largest difference of each curve from the first. The standard library is enough.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLORS = ("#1f5fa8", "#d9731a", "#2a8a57", "#8a4fa8")
WIDTH, LEFT, RIGHT = 760, 64, 24
TICKS = 5


@dataclass(frozen=True)
class Curve:
    """The losses of a run, one for each step."""

    name: str
    losses: tuple[float, ...]

    @classmethod
    def read(cls, argument: str) -> Curve:
        """From ``NAME=FILE``."""
        name, _, path = argument.partition("=")
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return cls(name, tuple(json.loads(line)["loss"] for line in lines))


@dataclass(frozen=True)
class Panel:
    """A frame with axes: ``top`` and ``height`` in pixels, values from ``low`` to ``high``."""

    top: float
    height: float
    low: float
    high: float
    steps: int

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, self.steps)

    def y(self, value: float) -> float:
        return self.top + self.height * (self.high - value) / (self.high - self.low)

    def line(self, values: Sequence[float], color: str, dashes: str) -> str:
        points = " ".join(f"{self.x(i):.1f},{self.y(v):.1f}" for i, v in enumerate(values))
        return (
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"'
            f' stroke-linejoin="round" stroke-dasharray="{dashes}"/>'
        )

    def axes(self, title: str, ticks: Sequence[tuple[float, str]]) -> list[str]:
        right, bottom = WIDTH - RIGHT, self.top + self.height
        drawn = [f'<text x="{LEFT}" y="{self.top - 10}" font-weight="bold">{escape(title)}</text>']
        for value, label in ticks:
            y = self.y(value)
            drawn.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e3e3e3"/>')
            drawn.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        for i in range(TICKS + 1):
            step = self.steps * i / TICKS
            drawn.append(
                f'<text x="{self.x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step:.0f}</text>'
            )
        drawn.append(f'<path d="M{LEFT} {bottom}H{right}" stroke="#888"/>')
        return drawn


def losses_panel(curves: Sequence[Curve], top: float, height: float) -> list[str]:
    """The curves themselves, from the largest to the smallest loss."""
    values = [value for curve in curves for value in curve.losses]
    panel = Panel(top, height, math.floor(min(values)), math.ceil(max(values)), steps(curves))
    ticks = [(float(v), str(v)) for v in range(int(panel.low), int(panel.high) + 1)]
    drawn = panel.axes("loss (nats per byte)", ticks)
    for i, curve in enumerate(curves):
        dashes = "" if i == 0 else f"{4 + 3 * i} {4 + 2 * i}"
        color = COLORS[i % len(COLORS)]
        drawn.append(panel.line(curve.losses, color, dashes))
        y = top + 18 + 20 * i
        x = WIDTH - RIGHT - 330
        drawn.append(
            f'<path d="M{x} {y - 4}h36" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )
        drawn.append(f'<text x="{x + 44}" y="{y}">{escape(curve.name)}</text>')
    return drawn


def differences_panel(curves: Sequence[Curve], top: float, height: float) -> list[str]:
    """How far the others are from the first, by powers of ten."""
    powers = [[math.log10(max(d, 1e-9)) for d in differences(curves[0], other)] for other in curves[1:]]
    low, high = math.floor(min(map(min, powers))), math.ceil(max(map(max, powers)))
    panel = Panel(top, height, low, max(high, low + 1), steps(curves))
    drawn = panel.axes(
        f"difference from “{curves[0].name}”", [(float(p), f"1e{p}") for p in range(low, high + 1)]
    )
    for i, values in enumerate(powers, 1):
        drawn.append(panel.line(values, COLORS[i % len(COLORS)], ""))
    return drawn


def differences(first: Curve, other: Curve) -> list[float]:
    """Absolute, step by step."""
    return [abs(a - b) for a, b in zip(first.losses, other.losses, strict=True)]


def steps(curves: Sequence[Curve]) -> int:
    """Of the longest run."""
    return max(len(curve.losses) for curve in curves)


def picture(curves: Sequence[Curve]) -> str:
    """An SVG: the losses, below them the differences, if there are any."""
    drawn = losses_panel(curves, 32, 300)
    height = 372
    if len(curves) > 1:
        drawn += differences_panel(curves, 402, 150)
        height = 592
    drawn.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 4}" text-anchor="middle">step</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" font-family="sans-serif" font-size="12" fill="#333">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *drawn, "</svg>\n"])


def main(out: str, *arguments: str) -> None:
    """Read, draw, and print the largest differences."""
    curves = [Curve.read(argument) for argument in arguments]
    Path(out).write_text(picture(curves), encoding="utf-8")
    for other in curves[1:]:
        found = differences(curves[0], other)
        print(
            f"{other.name}: at most {max(found):.1e} from {curves[0].name}, at step {found.index(max(found))}"
        )


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit('usage: plot_losses.py OUT.svg "NAME=LOSSES.jsonl" ...')
    main(*sys.argv[1:])
