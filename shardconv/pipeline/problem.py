"""A traced model and the demands on its plan: the same in every round."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shardconv_runtime.checkpoint.model_spec import ModelSpec
from torch import nn

from ..arguments import SolveOptions
from ..dim_analysis.analysis import Analysis
from ..dim_analysis.analyze import with_calls_alike
from ..dim_analysis.dim_trees import Node
from ..planning.expert_parallel import ExpertParallel
from ..planning.layout import Layouts
from ..planning.localize import localize
from ..planning.norm_plans import norm_plans
from ..planning.obstacle import Obstacle
from ..planning.packing_alignment import Steps
from ..planning.solution import Solution
from ..solving.gradients import solve_gradients
from ..solving.pins import Given
from ..solving.solve import Assignment
from ..tracing.fold import Folded
from ..tracing.inputs import TraceInputs
from ..verifying.simulation.layer_bypass import Bypass


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
