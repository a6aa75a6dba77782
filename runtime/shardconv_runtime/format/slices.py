"""Computes the positions of a tensor dim that each rank holds.

The tree of a dim (``dims.py``) and a rank give the vector of global positions that the rank holds. Slicing
a parameter, slicing and gathering an activation, merging and resharding all use it.

A size that the axes do not divide is sharded into shares that differ by at most one, the first
ranks taking the larger ones. A rank's positions always ascend.

This module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

from ..errors import PlanError
from .dims import MAX_DEPTH, MAX_SIZE, Dim, Leaf, Product, Sum, axes_of, shown, size

MAX_RANGES = 2**20
"""Most ranges that one rank's part of a dim may fall into."""

Mesh = tuple[int, ...]
"""Sizes of the mesh axes; ranks count row-major, the last axis fastest."""

Range = tuple[int, int]
"""Half-open ``[start, stop)``."""

Rows = Mapping[str, Range]
"""Names of tensors of which a process reads a part, and the positions of their first dim."""


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the coordinates of ``rank`` on each mesh axis."""
    out = []
    for extent in reversed(mesh):
        out.append(rank % extent)
        rank //= extent
    return tuple(reversed(out))


def rank_at(mesh: Mesh, coords: Sequence[int]) -> int:
    """Return the rank with these coordinates."""
    rank = 0
    for extent, coord in zip(mesh, coords, strict=True):
        rank = rank * extent + coord
    return rank


def group_of(mesh: Mesh, axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` in the coordinates of ``axes`` only, in coordinate order."""
    free = frozenset(axes)
    coords = coordinates(mesh, rank)
    choices = [range(extent) if a in free else (coords[a],) for a, extent in enumerate(mesh)]
    return tuple(rank_at(mesh, choice) for choice in product(*choices))


def share(leaf: Leaf, mesh: Mesh, rank: int) -> Range:
    """Return the part of a leaf that ``rank`` holds."""
    coords = coordinates(mesh, rank)
    parts, part = 1, 0
    for axis in leaf.axes:
        parts, part = parts * mesh[axis], part * mesh[axis] + coords[axis]
    small, larger = divmod(leaf.size, parts)
    start = part * small + min(part, larger)
    return start, start + small + (part < larger)


def local_size(dim: Dim, mesh: Mesh, rank: int) -> int:
    """Return the number of positions that ``rank`` holds."""
    if isinstance(dim, Leaf):
        start, stop = share(dim, mesh, rank)
        return stop - start
    if isinstance(dim, Product):
        return math.prod(local_size(f, mesh, rank) for f in dim.factors)
    return sum(local_size(s, mesh, rank) for s in dim.segments)


def ranges(dim: Dim, mesh: Mesh, rank: int) -> tuple[Range, ...]:
    """Return the global positions that ``rank`` holds, in local order, as maximal ranges.

    They ascend. There are few of them unless an inner factor is sharded: ``1000*64@0`` falls into
    1000 ranges for each rank.

    Raises:
        PlanError: more than ``MAX_RANGES`` ranges.
    """
    if isinstance(dim, Leaf):
        return merged([share(dim, mesh, rank)])
    if isinstance(dim, Sum):
        out: list[Range] = []
        offset = 0
        for segment in dim.segments:
            out.extend((offset + a, offset + b) for a, b in ranges(segment, mesh, rank))
            offset += size(segment)
        return merged(out)
    held_ranges: tuple[Range, ...] = ((0, 1),)
    for factor in dim.factors:
        extent, inner = size(factor), ranges(factor, mesh, rank)
        if inner == ((0, extent),):  # the rank holds all of the factor
            held_ranges = tuple((a * extent, b * extent) for a, b in held_ranges)
            continue
        if sum(b - a for a, b in held_ranges) * len(inner) > MAX_RANGES:
            raise PlanError(
                f"a dim falls into more than {MAX_RANGES} ranges for one rank: shard an outer factor"
            )
        held_ranges = merged(
            (i * extent + a, i * extent + b) for s, e in held_ranges for i in range(s, e) for a, b in inner
        )
    return held_ranges


def num_ranges(dim: Dim) -> int:
    """Return how many ranges a rank's part of the dim falls into at most."""
    if isinstance(dim, Leaf):
        return 1
    if isinstance(dim, Sum):
        return sum(map(num_ranges, dim.segments))
    count, outer = 1, 1
    for factor in dim.factors:
        if axes_of(factor):
            count = outer * num_ranges(factor)
        outer *= size(factor)
    return count


def merged(parts: Iterable[Range]) -> tuple[Range, ...]:
    """Return the same positions in the same order as maximal ranges, without empty ones."""
    out: list[Range] = []
    for a, b in parts:
        if a == b:
            continue
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)


def validate(dim: Dim, mesh: Mesh) -> None:
    """Check that the ranks of ``mesh`` together hold each position of the dim as its tree says.

    Raises:
        PlanError: a size below 1, an axis outside of the mesh, an axis that shards two factors of
            one product (some positions would be held by no rank), or a tree too deep or too large.
            The segments of a sum may share an axis.
    """
    _validate_tree(dim, mesh, dim, 0)
    if size(dim) > MAX_SIZE:
        raise PlanError(f"dim {shown(dim)}: its size is above {MAX_SIZE}")
    if num_ranges(dim) > MAX_RANGES:
        raise PlanError(
            f"dim {shown(dim)}: a rank's part of it may fall into more than {MAX_RANGES} ranges: shard an "
            "outer factor"
        )


def validate_tensor(dims: Sequence[Dim], mesh: Mesh) -> None:
    """Check each dim of a tensor, and that no mesh axis shards two of them; a dim may have no positions.

    Raises:
        PlanError: see ``validate``.
    """
    for dim in dims:
        if dim != Leaf(0):
            validate(dim, mesh)
    if twice := _repeated(axes_of(dim) for dim in dims):
        text = ", ".join(shown(dim) for dim in dims)
        raise PlanError(
            f"mesh axis {twice[0]} shards more than one dim of [{text}]; one axis can shard one dim"
        )


def _validate_tree(dim: Dim, mesh: Mesh, root: Dim, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise PlanError(f"a dim is nested deeper than {MAX_DEPTH} levels")
    if isinstance(dim, Leaf):
        leaf = dim
        problem = ""
        if leaf.size < 1:
            problem = "the size must be 1 or more"
        elif outside := [a for a in leaf.axes if not 0 <= a < len(mesh)]:
            problem = f"mesh axis {outside[0]} is outside of the mesh {list(mesh)}"
        elif len(set(leaf.axes)) < len(leaf.axes):
            problem = "a mesh axis is named twice"
        if problem:
            raise PlanError(f"dim {shown(root)}: leaf {shown(leaf)}: {problem}")
        return
    children = dim.factors if isinstance(dim, Product) else dim.segments
    if not children:
        raise PlanError("a product or sum of a dim has no parts")
    for child in children:
        _validate_tree(child, mesh, root, depth + 1)
    if isinstance(dim, Product) and (twice := _repeated(axes_of(child) for child in children)):
        raise PlanError(f"dim {shown(root)}: mesh axis {twice[0]} shards two factors of one product")


def _repeated(groups: Iterable[Iterable[int]]) -> list[int]:
    seen: set[int] = set()
    for group in groups:
        if both := seen.intersection(group):
            return sorted(both)
        seen.update(group)
    return []


def local_segments(dim: Dim, mesh: Mesh, rank: int) -> list[tuple[Range, frozenset[int]]]:
    """Return ranges of local positions of a dim that are sharded over the same axes, and these axes."""
    out: list[tuple[Range, frozenset[int]]] = []
    done = 0
    for length, axes in _local_runs(dim, mesh, rank):
        if length:
            out.append(((done, done + length), axes))
        done += length
    return out


def _local_runs(dim: Dim, mesh: Mesh, rank: int) -> list[tuple[int, frozenset[int]]]:
    """Return the lengths of runs of local positions, and the axes that shard each; neighbors differ."""
    if isinstance(dim, Leaf):
        return [(local_size(dim, mesh, rank), frozenset(dim.axes))]
    children = dim.factors if isinstance(dim, Product) else dim.segments
    runs = [_local_runs(child, mesh, rank) for child in children]
    if isinstance(dim, Sum):
        return _merged(run for part in runs for run in part)
    out = runs[-1]
    for outer in reversed(runs[:-1]):
        if len(out) == 1:
            ((length, axes),) = out
            out = _merged((n * length, a | axes) for n, a in outer)
        else:
            out = _merged((m, a | b) for n, a in outer for _ in range(n) for m, b in out)
    return out


def _merged(runs: Iterable[tuple[int, frozenset[int]]]) -> list[tuple[int, frozenset[int]]]:
    out: list[tuple[int, frozenset[int]]] = []
    for length, axes in runs:
        if out and out[-1][1] == axes:
            length += out.pop()[0]
        out.append((length, axes))
    return out


class MemberPiece(NamedTuple):
    """Local positions ``[start, stop)`` of one member of a group."""

    member: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GatherIndex:
    """How the local pieces of a group of ranks make up the global dim."""

    sizes: tuple[int, ...]
    """Local size of each member, in coordinate order."""
    pieces: tuple[MemberPiece, ...]
    """Laid end to end they are the global dim. A position that several members hold is taken from one."""

    def ranges(self, stride: int | None = None) -> tuple[Range, ...]:
        """Return the positions in the concatenated local pieces that, in this order, are the global dim.

        Args:
            stride: positions that each member takes in the concatenation, if they are padded
                to a common size; by default each takes its own positions.
        """
        offsets = [0]
        for local_length in self.sizes:
            offsets.append(offsets[-1] + (local_length if stride is None else stride))
        return merged((offsets[m] + start, offsets[m] + stop) for m, start, stop in self.pieces)


def gather_index(dim: Dim, mesh: Mesh, axes: Iterable[int] | None = None) -> GatherIndex:
    """Return how to rebuild the global dim from the local pieces of the ranks along ``axes``.

    Args:
        axes: mesh axes of the group, at least the axes that shard the dim (the default).
            ``group_of(mesh, axes, rank)`` lists the members; the answer is the same for each such group.

    Raises:
        PlanError: ``axes`` lack an axis that shards the dim.
    """
    group_axes = axes_of(dim) if axes is None else frozenset(axes)
    if missing := sorted(axes_of(dim) - group_axes):
        raise PlanError(
            f"a gather of dim {shown(dim)} over mesh axes {sorted(group_axes)} lacks axes {missing}"
        )
    members = group_of(mesh, group_axes, 0)
    sizes = tuple(local_size(dim, mesh, rank) for rank in members)
    held_pieces = chain.from_iterable(_held(dim, mesh, rank, member) for member, rank in enumerate(members))
    return GatherIndex(sizes, tuple(_cover(sorted(held_pieces))))


_Held = tuple[int, int, int, int]
"""(global start, global stop, member, local start)"""


def _held(dim: Dim, mesh: Mesh, rank: int, member: int) -> Iterator[_Held]:
    local = 0
    for start, stop in ranges(dim, mesh, rank):
        yield start, stop, member, local
        local += stop - start


def _cover(held: Iterable[_Held]) -> Iterator[MemberPiece]:
    """Take each global position once, from the first range that reaches it."""
    done = 0
    for start, stop, member, local in held:
        if stop > done:
            assert start <= done, "the ranks of a group hold every position"
            yield MemberPiece(member, local + done - start, local + stop - start)
            done = stop
