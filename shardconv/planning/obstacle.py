"""What keeps a solution from becoming a plan: a value, after which the model is solved again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..dim_analysis.dim_trees import Node, find, leaves


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Dims that were sharded and must stay replicated; a stage returns it in place of its result."""

    nodes: tuple[Node, ...]
    """Trees whose leaves are ruled out; empty if it is not known which ones are to blame."""
    where: str
    """The call or the module that does not work on shards, and why."""
    several_calls_of: str = ""
    """A module whose calls got different steps, which it cannot have; empty if that is not the problem."""
    others: tuple[Obstacle, ...] = ()
    """Those of other modules that were met in the same solution: each would take a round of its own."""


def joined(obstacles: Iterable[Obstacle]) -> Obstacle | None:
    """The first obstacle, with those of others that blame other dims; None if there are none."""
    blamed: set[Node] = set()
    kept: list[Obstacle] = []
    for obstacle in obstacles:
        nodes = {find(x) for node in obstacle.nodes for x in leaves(node)}
        if not kept or ((nodes or obstacle.several_calls_of) and nodes.isdisjoint(blamed)):
            kept.append(obstacle)
            blamed |= nodes
    return replace(kept[0], others=tuple(kept[1:])) if kept else None
