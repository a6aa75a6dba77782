"""How the global dim of a tensor is put together from the pieces that ranks hold.

This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ..errors import PlanError
from .dims import Dim, axes_of, shown
from .slices import Mesh, Range, group_of, local_size, merged, ranges


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
        """Positions in the concatenated local pieces that, in this order, are the global dim.

        Args:
            stride: positions that each member takes in the concatenation, where they are padded
                to a common size; by default each takes what it holds.
        """
        offsets = [0]
        for held in self.sizes:
            offsets.append(offsets[-1] + (held if stride is None else stride))
        return merged((offsets[m] + start, offsets[m] + stop) for m, start, stop in self.pieces)


def gather_index(dim: Dim, mesh: Mesh, axes: Iterable[int] | None = None) -> GatherIndex:
    """How to rebuild the global dim from the local pieces of the ranks along ``axes``.

    Args:
        axes: mesh axes of the group, at least those that shard the dim (the default). The
            members are those of ``group_of(mesh, axes, rank)``; the answer is the same for each
            such group.

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
    held = chain.from_iterable(_held(dim, mesh, rank, member) for member, rank in enumerate(members))
    return GatherIndex(sizes, tuple(_cover(sorted(held))))


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
