"""Solving again and again: each obstacle rules out leaves that are to blame, or differences between calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardconv_runtime.errors import SolveError

from ..dim_analysis.dim_trees import Node, find, leaves
from ..planning.obstacle import Obstacle

MAX_ROUNDS = 32

T = TypeVar("T")


@dataclass(frozen=True)
class RuledOut:
    """What no solution of the next round may have."""

    nodes: Sequence[Node]
    """Dims that must stay replicated."""
    reasons: Mapping[Node, str] = field(default_factory=dict)
    """Leaves that an obstacle ruled out -> where it was met."""
    alike: frozenset[str] = frozenset()
    """Modules whose calls must get the same steps."""

    def and_also(self, obstacle: Obstacle) -> RuledOut:
        """This, and the dims that an obstacle, and those that were met with it, are blamed on.

        Raises:
            SolveError: the obstacle is blamed on nothing that was sharded.
        """
        out = self._with(obstacle)
        for other in obstacle.others:
            out = out._with(other)
        return out

    def _with(self, obstacle: Obstacle) -> RuledOut:
        module = obstacle.several_calls_of
        if module and module not in self.alike:
            return replace(self, alike=self.alike | {module})
        if not obstacle.nodes:
            raise SolveError(f"{obstacle.where}: no attribute edit makes this call local")
        reasons = {find(x): obstacle.where for node in obstacle.nodes for x in leaves(node)}
        return replace(self, nodes=(*self.nodes, *obstacle.nodes), reasons={**self.reasons, **reasons})

    def last_reason(self) -> str:
        """Where the last obstacle was met; empty if there was none."""
        return list(self.reasons.values())[-1] if self.reasons else ""


def in_rounds(
    attempt: Callable[[RuledOut], T | Obstacle | None], forbidden: Sequence[Node]
) -> tuple[T | None, RuledOut]:
    """Attempt, and again with more ruled out after each obstacle, until there is none.

    Args:
        attempt: solves with some dims ruled out; None means that it gives up.
        forbidden: dims that must stay replicated from the first round on.

    Returns:
        The first result, and the dims that were ruled out for it; None if there is none in ``MAX_ROUNDS``.
    """
    ruled_out = RuledOut(forbidden)
    for _ in range(MAX_ROUNDS):
        result = attempt(ruled_out)
        if not isinstance(result, Obstacle):
            return result, ruled_out
        ruled_out = ruled_out.and_also(result)
    return None, ruled_out
