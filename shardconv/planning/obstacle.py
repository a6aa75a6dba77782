"""What keeps a solution from becoming a plan: a value, after which the model is solved again."""

from __future__ import annotations

from dataclasses import dataclass

from ..dim_analysis.dim_trees import Node


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Dims that were sharded and must stay replicated; a stage returns it in place of its result."""

    nodes: tuple[Node, ...]
    """Trees whose leaves are ruled out; empty if it is not known which ones are to blame."""
    where: str
    """The call or the module that does not work on shards, and why."""
    several_calls_of: str = ""
    """A module whose calls got different steps, which it cannot have; empty if that is not the problem."""
