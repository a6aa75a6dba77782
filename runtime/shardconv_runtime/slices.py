"""Which positions of a tensor dim each rank holds.

A dim is a tree:

- a **leaf** of some size, split over zero or more mesh axes,
- a **product** of dims, outer to inner (``heads * head_dim``),
- a **sum** of segments, laid end to end (``q + k + v``).

The tree and a rank give the vector of global positions which that rank holds. Slicing a
parameter, gathering and slicing an activation, merging and resharding all use that vector.

Written as text, a leaf is its size and, after ``@``, the mesh axes that split it: ``32@0*128``
is 32 heads split over mesh axis 0, each 128 wide; ``32@0*128 + 8@0*128 + 8@0*128`` a fused
query/key/value dim. ``4@0.1`` splits over axes 0 and 1, axis 0 being the outer.

A size that the axes do not divide is split into shares that differ by at most one, the first
ranks taking the larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import PlanError

Mesh = tuple[int, ...]
"""Sizes of the mesh axes; ranks count row-major, the last axis fastest."""

Range = tuple[int, int]
"""Half-open ``[start, stop)``."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """``size`` positions, split over mesh ``axes`` (outer first); no axes: whole on every rank."""

    size: int
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Product:
    """Mixed-radix positions; ``factors`` outer to inner."""

    factors: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """``segments`` laid end to end."""

    segments: tuple[Dim, ...]


Dim = Leaf | Product | Sum


def size(dim: Dim) -> int:
    """Global size of the dim."""
    if isinstance(dim, Leaf):
        return dim.size
    if isinstance(dim, Product):
        return math.prod(size(f) for f in dim.factors)
    return sum(size(s) for s in dim.segments)


def axes_of(dim: Dim) -> frozenset[int]:
    """All mesh axes that split some leaf of the dim."""
    return frozenset(a for leaf in leaves(dim) for a in leaf.axes)


def leaves(dim: Dim) -> Iterator[Leaf]:
    """The leaves, in order."""
    if isinstance(dim, Leaf):
        yield dim
    else:
        for child in dim.factors if isinstance(dim, Product) else dim.segments:
            yield from leaves(child)


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Coordinates of ``rank`` on each mesh axis."""
    out = []
    for extent in reversed(mesh):
        out.append(rank % extent)
        rank //= extent
    return tuple(reversed(out))


def share(leaf: Leaf, mesh: Mesh, rank: int) -> Range:
    """The part of a leaf that ``rank`` holds."""
    coords = coordinates(mesh, rank)
    parts, part = 1, 0
    for axis in leaf.axes:
        parts, part = parts * mesh[axis], part * mesh[axis] + coords[axis]
    small, larger = divmod(leaf.size, parts)
    start = part * small + min(part, larger)
    return start, start + small + (part < larger)


def local_size(dim: Dim, mesh: Mesh, rank: int) -> int:
    """Number of positions that ``rank`` holds."""
    if isinstance(dim, Leaf):
        start, stop = share(dim, mesh, rank)
        return stop - start
    if isinstance(dim, Product):
        return math.prod(local_size(f, mesh, rank) for f in dim.factors)
    return sum(local_size(s, mesh, rank) for s in dim.segments)


def ranges(dim: Dim, mesh: Mesh, rank: int) -> tuple[Range, ...]:
    """The global positions that ``rank`` holds, in local order, as maximal ranges."""
    if isinstance(dim, Leaf):
        return (share(dim, mesh, rank),)
    if isinstance(dim, Sum):
        out: list[Range] = []
        offset = 0
        for segment in dim.segments:
            out.extend((offset + a, offset + b) for a, b in ranges(segment, mesh, rank))
            offset += size(segment)
        return _merge(out)
    held: tuple[Range, ...] = ((0, 1),)
    for factor in dim.factors:
        held = _refine(held, size(factor), ranges(factor, mesh, rank))
    return held


def _refine(outer: tuple[Range, ...], inner_size: int, inner: tuple[Range, ...]) -> tuple[Range, ...]:
    if inner == ((0, inner_size),):
        return tuple((a * inner_size, b * inner_size) for a, b in outer)
    return _merge([(i * inner_size + a, i * inner_size + b) for s, e in outer for i in range(s, e) for a, b in inner])


def _merge(parts: list[Range]) -> tuple[Range, ...]:
    out: list[Range] = []
    for a, b in parts:
        if a == b:
            continue
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)


def to_text(dim: Dim) -> str:
    """The dim as text; ``parse`` reads it back."""
    if isinstance(dim, Leaf):
        return str(dim.size) + ("@" + ".".join(map(str, dim.axes)) if dim.axes else "")
    if isinstance(dim, Product):
        return "*".join(f"({to_text(f)})" if isinstance(f, Sum) else to_text(f) for f in dim.factors)
    return " + ".join(to_text(s) for s in dim.segments)


def parse(text: str) -> Dim:
    """Read a dim from text.

    Raises:
        PlanError: the text is not a dim.
    """
    raise PlanError(f"not a dim: {text!r}")
