"""A problem to solve, and its rounds: each obstacle rules out leaves, or differences between calls."""

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
from ..solving.pins import Given
from ..solving.solve import Assignment
from ..tracing.fold import Folded

# A traced model and the demands on its plan: the same in every round.


@dataclass(frozen=True)
class PlanProblem:
    """A model, its analysis, and the options of its plan."""

    spec: ModelSpec
    options: SolveOptions
    model: nn.Module
    """Global, on meta."""
    inputs: TraceInputs
    folded: Folded
    analysis: Analysis
    expert_parallel: ExpertParallel | None
    steps: Steps
    given: Given | None
    """Layouts of parameters that are settled: those of the model of adapters."""
    bypassed: Mapping[str, Bypass]
    """Layers that others stand for, and how to leave them out."""

    def with_calls_alike(self, fqns: Collection[str]) -> PlanProblem:
        """The problem of a plan in which the calls of these modules have the same steps."""
        return replace(self, analysis=with_calls_alike(self.analysis, fqns)) if fqns else self

    def solution(self, assignment: Assignment, reasons: Mapping[Node, str]) -> Solution | Obstacle:
        """The assignment with all that a plan says.

        Args:
            assignment: the placement of every tensor.
            reasons: of the leaves that were ruled out for it.
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
        """Dims that no solution may shard."""
        return self.expert_parallel.forbidden() if self.expert_parallel else []


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
            SolveError: if the obstacle is blamed on nothing that was sharded.
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
