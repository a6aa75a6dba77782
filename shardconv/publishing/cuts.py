"""How a dim is cut into the pieces of the ranks, in few enough pieces to be drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from shardconv_runtime.format.dims import Dim, Leaf, Product, axes_of, size
from shardconv_runtime.format.slices import Mesh, rank_at

MAX_PARTS = 8
"""More parts than so of one dim are drawn as the first three, a gap, and the last."""

MAX_REPEATS = 3
"""How often a pattern is drawn that repeats more often."""

MAX_PIECES = 128
"""Most pieces of one dim; beyond, the rest is a gap."""

Coordinates = Mapping[int, int]
"""Mesh axis -> coordinate of the ranks that hold a piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a dim that the same ranks hold."""

    start: float
    """0 to 1, as it is drawn."""
    stop: float
    coordinates: Coordinates | None
    """None: a gap that stands for pieces which are left out."""


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that hold a piece alike."""

    first: int
    last: int
    count: int


def pieces(dim: Dim, mesh: Mesh) -> tuple[Piece, ...]:
    """Cut a dim; one piece with no coordinates where each rank holds all of it.

    Where there are many parts or repetitions, the widths are no longer those of the dim: a few pieces
    stand for all.
    """
    runs = _runs(dim, mesh)
    if len(runs) > MAX_PIECES:
        rest = math.fsum(width for width, _ in runs[MAX_PIECES:])
        runs = [*runs[:MAX_PIECES], (rest, None)]
    total = math.fsum(width for width, _ in runs) or 1.0
    out, done = [], 0.0
    for width, coordinates in runs:
        out.append(Piece(done / total, (done + width) / total, coordinates))
        done += width
    return tuple(out)


def holders(coordinates: Coordinates, mesh: Mesh) -> Holders:
    """The ranks with these coordinates."""
    first = rank_at(mesh, [coordinates.get(axis, 0) for axis in range(len(mesh))])
    last = rank_at(mesh, [coordinates.get(axis, extent - 1) for axis, extent in enumerate(mesh)])
    return Holders(first, last, math.prod(e for axis, e in enumerate(mesh) if axis not in coordinates))


_Run = tuple[float, Coordinates | None]


def _runs(dim: Dim, mesh: Mesh) -> list[_Run]:
    """Width and holders of the pieces, in the order of the positions."""
    if not axes_of(dim):
        return [(float(size(dim)), {})]
    if isinstance(dim, Leaf):
        return list(_leaf(dim, mesh))
    if isinstance(dim, Product):
        return _product(dim.factors, mesh)
    runs: list[_Run] = []
    for segment in dim.segments:
        if len(runs) > MAX_PIECES:
            runs.append((float(size(segment)), None))
        else:
            runs += _runs(segment, mesh)
    return runs


def _leaf(leaf: Leaf, mesh: Mesh) -> Iterator[_Run]:
    extents = [mesh[axis] for axis in leaf.axes]
    parts = math.prod(extents)
    small, larger = divmod(leaf.size, parts)
    if min(parts, leaf.size) <= MAX_PARTS:
        for part in range(min(parts, leaf.size)):
            yield float(small + (part < larger)), _coordinates(leaf, extents, part)
        return
    width = leaf.size / 6
    for part in range(3):
        yield width, _coordinates(leaf, extents, part)
    yield 2 * width, None
    yield width, _coordinates(leaf, extents, min(parts, leaf.size) - 1)


def _coordinates(leaf: Leaf, extents: Sequence[int], part: int) -> Coordinates:
    found: dict[int, int] = {}
    for axis, extent in zip(reversed(leaf.axes), reversed(extents), strict=True):
        found[axis], part = part % extent, part // extent
    return found


def _product(factors: Sequence[Dim], mesh: Mesh) -> list[_Run]:
    """What an outer factor repeats is drawn ``MAX_REPEATS`` times at most."""
    outer, *inner = factors
    if not inner:
        return _runs(outer, mesh)
    inside = _product(inner, mesh)
    around = _runs(outer, mesh)
    if not any(coordinates is None or coordinates for _, coordinates in inside):
        scale = math.fsum(width for width, _ in inside)
        return [(width * scale, coordinates) for width, coordinates in around]
    if len(around) * len(inside) > MAX_PIECES:
        around = around[:MAX_REPEATS]
    times = 1 if axes_of(outer) else min(MAX_REPEATS, size(outer))
    found = [
        (width / times * part, _joined(a, b))
        for width, a in around
        for _, (part, b) in product(range(times), inside)
    ]
    return _few(found) if axes_of(outer) and len(found) > MAX_PARTS else found


def _few(runs: Sequence[_Run]) -> list[_Run]:
    """The first three pieces, a gap, and the last, instead of many."""
    held = [coordinates for _, coordinates in runs if coordinates is not None]
    width = math.fsum(width for width, _ in runs) / 6
    return [*((width, coordinates) for coordinates in held[:3]), (2 * width, None), (width, held[-1])]


def _joined(outer: Coordinates | None, inner: Coordinates | None) -> Coordinates | None:
    return None if outer is None or inner is None else {**outer, **inner}
