"""Which local positions of a dim are sharded over the same mesh axes."""

from __future__ import annotations

from collections.abc import Iterable

from .dims import Dim, Leaf, Product, Sum
from .slices import Mesh, Range, local_size


def local_segments(dim: Dim, mesh: Mesh, rank: int) -> list[tuple[Range, frozenset[int]]]:
    """Nonempty ranges of local positions of a dim that are sharded over the same axes, and these axes."""
    out: list[tuple[Range, frozenset[int]]] = []
    done = 0
    for length, axes in _local_runs(dim, mesh, rank):
        if length:
            out.append(((done, done + length), axes))
        done += length
    return out


def _local_runs(dim: Dim, mesh: Mesh, rank: int) -> list[tuple[int, frozenset[int]]]:
    """Lengths of runs of local positions, and the axes that shard each; neighbors differ."""
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
