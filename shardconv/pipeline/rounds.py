"""Solve a problem in rounds: each obstacle rules out leaves, or different steps in calls of a module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import SolveError
from torch import nn

from ..arguments import SolveOptions
from ..dim_analysis.analysis import Analysis
from ..dim_analysis.analyze import with_calls_alike
from ..dim_analysis.dim_trees import Node, find, leaves
from ..inputs.trace_inputs import TraceInputs
from ..planning.expert_parallel import ExpertParallel
from ..planning.layout import Layouts
from ..planning.localize import localize
from ..planning.module_plans import norm_plans
from ..planning.obstacle import Obstacle
from ..planning.parameter_plans import Steps
from ..planning.solution import Solution
from ..simulation.layer_bypass import Bypass
from ..solving.gradients import solve_gradients
from ..solving.solve import Assignment, Given
from ..tracing.fold import Folded


@dataclass(frozen=True)
class PlanProblem:
    """A model, its analysis, and the options of its plan. It is the same in every round."""

    spec: ModelSpec
    options: SolveOptions
    model: nn.Module
    """The unsharded model, on meta."""
    inputs: TraceInputs
    folded: Folded
    analysis: Analysis
    expert_parallel: ExpertParallel | None
    steps: Steps
    given: Given | None
    """Layouts of parameters that are fixed, since the model already has shards (for adapters)."""
    bypassed: Mapping[str, Bypass]
    """Layers that are represented by others, and how to bypass them."""

    def with_calls_alike(self, fqns: Collection[str]) -> PlanProblem:
        """Return the problem of a plan in which all calls of each of these modules have the same steps."""
        return replace(self, analysis=with_calls_alike(self.analysis, fqns)) if fqns else self

    def solution(self, assignment: Assignment, reasons: Mapping[Node, str]) -> Solution | Obstacle:
        """Complete an assignment by everything that a plan contains.

        Args:
            assignment: the placement of every tensor.
            reasons: leaves that were ruled out -> where.
        """
        layouts = Layouts(self.analysis, assignment)
        norms = norm_plans(self.model, layouts)
        if isinstance(norms, Obstacle):
            return norms
        edits = localize(layouts)
        if isinstance(edits, Obstacle):
            return edits
        if self.expert_parallel:
            edits |= self.expert_parallel.edits(layouts)
        gradients = solve_gradients(self.analysis, assignment, self.folded)
        return Solution(layouts, edits, norms, self.folded, reasons, gradients)

    def forbidden(self) -> list[Node]:
        """Return dims that no solution may shard."""
        return self.expert_parallel.forbidden() if self.expert_parallel else []


MAX_ROUNDS = 32

T = TypeVar("T")


@dataclass(frozen=True)
class RuledOut:
    """Constraints that earlier rounds put on the solution."""

    nodes: Sequence[Node]
    """Dims that must stay replicated."""
    reasons: Mapping[Node, str] = field(default_factory=dict)
    """Leaves that an obstacle ruled out -> where the obstacle was."""
    alike: frozenset[str] = frozenset()
    """Modules whose calls must get the same steps."""

    def and_also(self, obstacle: Obstacle) -> RuledOut:
        """Add the dims that caused an obstacle, and the obstacles that were found with it.

        Raises:
            SolveError: if the obstacle is blamed on nothing that was sharded.
        """
        nodes, reasons, alike = list(self.nodes), dict(self.reasons), set(self.alike)
        for each in (obstacle, *obstacle.others):
            if each.several_calls_of and each.several_calls_of not in alike:
                alike.add(each.several_calls_of)
            elif not each.nodes:
                raise SolveError(f"{each.where}: no attribute edit makes this call local")
            else:
                nodes += each.nodes
                reasons |= {find(x): each.where for node in each.nodes for x in leaves(node)}
        return RuledOut(tuple(nodes), reasons, frozenset(alike))

    def last_reason(self) -> str:
        """Return where the last obstacle was; empty if there was none."""
        return list(self.reasons.values())[-1] if self.reasons else ""


def in_rounds(
    attempt: Callable[[RuledOut], T | Obstacle | None], forbidden: Sequence[Node]
) -> tuple[T | None, RuledOut]:
    """Call ``attempt``, and again with more ruled out after each obstacle, until it returns no obstacle.

    Args:
        attempt: solves with some dims ruled out. It returns None to give up.
        forbidden: dims that must stay replicated from the first round on.

    Returns:
        The result, and the dims that were ruled out. The result is None if ``MAX_ROUNDS`` were not enough.
    """
    ruled_out = RuledOut(forbidden)
    for _ in range(MAX_ROUNDS):
        result = attempt(ruled_out)
        if not isinstance(result, Obstacle):
            return result, ruled_out
        ruled_out = ruled_out.and_also(result)
    return None, ruled_out
