"""Conflicts that keep a solution from becoming a plan. The model is solved again after a conflict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..dim_analysis.dim_trees import Node, find, leaves


@dataclass(frozen=True, slots=True)
class Conflict:
    """Dims that were sharded and must stay replicated. A stage returns it instead of its result."""

    nodes: tuple[Node, ...]
    """Trees whose leaves are ruled out; empty if the cause is unknown."""
    where: str
    """The call or the module that does not work on shards, and the reason."""
    several_calls_of: str = ""
    """A module whose calls got different steps, which is not possible; otherwise empty."""
    others: tuple[Conflict, ...] = ()
    """Conflicts of other modules in the same solution, which would each take another round."""


def joined(conflicts: Iterable[Conflict]) -> Conflict | None:
    """Return the first conflict with the others that blame other dims; None if there are none."""
    blamed: set[Node] = set()
    distinct: list[Conflict] = []
    for conflict in conflicts:
        nodes = {find(x) for node in conflict.nodes for x in leaves(node)}
        if not distinct or ((nodes or conflict.several_calls_of) and nodes.isdisjoint(blamed)):
            distinct.append(conflict)
            blamed |= nodes
    return replace(distinct[0], others=tuple(distinct[1:])) if distinct else None
