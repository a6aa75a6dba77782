"""Finds how a dim is sharded over the ranks, in few enough stretches to be drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from shardconv_runtime.format.dims import Dim, Leaf, Product, axes_of, size
from shardconv_runtime.format.slices import Mesh, rank_at

MAX_SHARDS = 8
"""More shards of one leaf are drawn as the first three, a gap, and the last."""

MAX_REPEATS = 3
"""Most repetitions of a pattern that are drawn."""

MAX_STRETCHES = 128
"""Most stretches of one dim; the rest is a gap."""

Coordinates = Mapping[int, int]
"""Mesh axis -> coordinate of the ranks that hold a stretch."""


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """Neighboring positions of a dim that the same ranks hold."""

    start: float
    """The first position as it is drawn, from 0 to 1."""
    stop: float
    coordinates: Coordinates | None
    """Coordinates of the ranks; None: a gap, for stretches that are left out."""


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that hold the same stretch."""

    first: int
    last: int
    count: int


def stretches(dim: Dim, mesh: Mesh) -> tuple[HeldSegment, ...]:
    """Return the stretches of a dim in order; one without coordinates if the dim is replicated.

    With many shards or repetitions only a few stretches are returned, and the widths are not to scale.
    """
    runs = _runs(dim, mesh)
    if len(runs) > MAX_STRETCHES:
        rest = math.fsum(width for width, _ in runs[MAX_STRETCHES:])
        runs = [*runs[:MAX_STRETCHES], (rest, None)]
    total = math.fsum(width for width, _ in runs) or 1.0
    out, done = [], 0.0
    for width, coordinates in runs:
        out.append(HeldSegment(done / total, (done + width) / total, coordinates))
        done += width
    return tuple(out)


def holders(coordinates: Coordinates, mesh: Mesh) -> Holders:
    """Return the ranks with these coordinates."""
    first = rank_at(mesh, [coordinates.get(axis, 0) for axis in range(len(mesh))])
    last = rank_at(mesh, [coordinates.get(axis, extent - 1) for axis, extent in enumerate(mesh)])
    return Holders(first, last, math.prod(e for axis, e in enumerate(mesh) if axis not in coordinates))


_Run = tuple[float, Coordinates | None]


def _runs(dim: Dim, mesh: Mesh) -> list[_Run]:
    """Return width and holders of the stretches, in the order of the positions."""
    if not axes_of(dim):
        return [(float(size(dim)), {})]
    if isinstance(dim, Leaf):
        return list(_leaf(dim, mesh))
    if isinstance(dim, Product):
        return _product(dim.factors, mesh)
    runs: list[_Run] = []
    for segment in dim.segments:
        if len(runs) > MAX_STRETCHES:
            runs.append((float(size(segment)), None))
        else:
            runs += _runs(segment, mesh)
    return runs


def _leaf(leaf: Leaf, mesh: Mesh) -> Iterator[_Run]:
    extents = [mesh[axis] for axis in leaf.axes]
    num_shards = math.prod(extents)
    small, num_larger = divmod(leaf.size, num_shards)
    if min(num_shards, leaf.size) <= MAX_SHARDS:
        for index in range(min(num_shards, leaf.size)):
            yield float(small + (index < num_larger)), _coordinates(leaf, extents, index)
        return
    width = leaf.size / 6
    for index in range(3):
        yield width, _coordinates(leaf, extents, index)
    yield 2 * width, None
    yield width, _coordinates(leaf, extents, min(num_shards, leaf.size) - 1)


def _coordinates(leaf: Leaf, extents: Sequence[int], index: int) -> Coordinates:
    found: dict[int, int] = {}
    for axis, extent in zip(reversed(leaf.axes), reversed(extents), strict=True):
        found[axis], index = index % extent, index // extent
    return found


def _product(factors: Sequence[Dim], mesh: Mesh) -> list[_Run]:
    """Return the runs of a product; an outer factor repeats the inner ones ``MAX_REPEATS`` times at most."""
    outer, *inner = factors
    if not inner:
        return _runs(outer, mesh)
    inside = _product(inner, mesh)
    around = _runs(outer, mesh)
    if not any(coordinates is None or coordinates for _, coordinates in inside):
        scale = math.fsum(width for width, _ in inside)
        return [(width * scale, coordinates) for width, coordinates in around]
    if len(around) * len(inside) > MAX_STRETCHES:
        around = around[:MAX_REPEATS]
    times = 1 if axes_of(outer) else min(MAX_REPEATS, size(outer))
    runs: list[_Run] = [
        (width / times * share, None if a is None or b is None else {**a, **b})
        for width, a in around
        for _, (share, b) in product(range(times), inside)
    ]
    if not axes_of(outer) or len(runs) <= MAX_SHARDS:
        return runs
    # Keep the first three runs, a gap, and the last, instead of many.
    held = [coordinates for _, coordinates in runs if coordinates is not None]
    width = math.fsum(width for width, _ in runs) / 6
    return [*((width, coordinates) for coordinates in held[:3]), (2 * width, None), (width, held[-1])]
