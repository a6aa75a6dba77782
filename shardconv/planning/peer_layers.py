"""An obstacle in one layer is met in every layer that does the same: all of them are ruled out at once.

Layers of a stack that could be folded are solved as one anyway. Those of other stacks, such as layers that
write to states which the model made before, would each meet the obstacle in a round of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Node, find, leaves
from ..tracing.fold import NUMBERED
from ..tracing.layer_kinds import Segment, alike, segments_of
from .obstacle import Obstacle, joined


@dataclass(frozen=True)
class PeerLayers:
    """The layers of one model that do the same."""

    analysis: Analysis

    def widened(self, obstacle: Obstacle) -> Obstacle:
        """The obstacle with the leaves that correspond to its own, in all layers like those of its own.

        Of those that were met with it, what blames some of these leaves is left out.
        """
        each = (obstacle, *obstacle.others)
        return joined(replace(one, nodes=self._widened(one.nodes), others=()) for one in each) or obstacle

    def _widened(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        found = dict.fromkeys(find(x) for node in nodes for x in leaves(node))
        for group in self._groups if found else ():
            found |= self._corresponding(group, found)
        return tuple(found) if found else tuple(nodes)

    @cached_property
    def _groups(self) -> list[list[Segment]]:
        """Calls of layers that do the same, inner ones first."""
        tape = self.analysis.tape
        siblings: dict[str, list[int]] = {}
        for index, call in enumerate(tape.calls):
            match = NUMBERED.fullmatch(call.fqn)
            if match:
                siblings.setdefault(match[1], []).append(index)
        groups = (alike(tape, segments_of(tape, calls)) for calls in reversed(siblings.values()))
        return [group for found in groups for group in found if len(group) > 1]

    def _corresponding(self, group: list[Segment], found: Iterable[Node]) -> dict[Node, None]:
        """The leaves of all layers of a group at the places where one of them has one of these."""
        wanted = set(found)
        places = {
            (position, dim, index)
            for layer in group
            for position, dim, index, leaf in self._leaves(layer)
            if leaf in wanted
        }
        return {
            leaf: None
            for layer in (group if places else ())
            for position, dim, index, leaf in self._leaves(layer)
            if (position, dim, index) in places
        }

    def _leaves(self, layer: Segment) -> Iterable[tuple[int, int, int, Node]]:
        """Each leaf of what a layer makes and reads, after its tensor, its dim, and its number in that."""
        dims = self.analysis.dims
        for position, tid in enumerate((*layer.made, *layer.outside)):
            for number, dim in enumerate(dims.get(tid, ())):
                for index, leaf in enumerate(leaves(dim)):
                    yield position, number, index, find(leaf)
