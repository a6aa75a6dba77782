"""Over which ranks the gradient of a parameter is summed, and at which of its positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from .dims import Dim
from .plan import ParameterPlan
from .slices import Mesh, Range, local_segments


@dataclass(frozen=True, slots=True)
class GradSum:
    """Positions of a local tensor, ranges in each dim, and the mesh axes over which gradients are summed."""

    axes: tuple[int, ...]
    positions: tuple[tuple[Range, ...], ...]
    is_full: bool


def sums(entry: ParameterPlan, mesh: Mesh, rank: int, axes: Iterable[int]) -> tuple[GradSum, ...]:
    """Return the sums that a parameter's local gradient needs, which is Partial over ``axes``.

    The positions of a sum are replicated along its axes.
    """
    wanted = {a for a in axes if mesh[a] > 1}
    if not wanted:
        return ()
    dims = [by_axes(dim, mesh, rank) for dim in entry.dims]
    cells = list(product(*(each.items() for each in dims)))
    found = []
    for cell in cells:
        left = tuple(sorted(wanted.difference(*(sharded for sharded, _ in cell))))
        if left:
            found.append(GradSum(left, tuple(spans for _, spans in cell), len(cells) == 1))
    return tuple(sorted(found, key=lambda each: (each.axes, each.positions)))


def by_axes(dim: Dim, mesh: Mesh, rank: int) -> dict[frozenset[int], tuple[Range, ...]]:
    """Return the ranges of local positions of a dim, by the axes over which they are sharded."""
    out: dict[frozenset[int], tuple[Range, ...]] = {}
    for span, sharded in local_segments(dim, mesh, rank):
        out[sharded] = (*out.get(sharded, ()), span)
    return out
