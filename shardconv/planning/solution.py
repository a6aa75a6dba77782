"""A solved and localized model, before it is written as a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardconv_runtime.format.plan import NormInfo, Plan
from shardconv_runtime.format.slot_steps import AllGatherStep, AllReduceStep, Boundary, SliceStep
from shardconv_runtime.parallel.boundary import in_use

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Node
from ..solving.gradients import Gradients, placement
from ..tracing.fold import Folded
from ..tracing.tape import Mark, Op, prefixes
from .layout import Layouts
from .localize import Attribute, AttributeEdit

# A plan without steps and entries for training.


def inference_only(plan: Plan, why: str = "") -> Plan:
    """The plan with the forward pass alone.

    Args:
        plan: a plan.
        why: why its gradients are left out.
    """
    modules = [
        replace(entry, inputs=_steps(entry.inputs), outputs=_steps(entry.outputs)) for entry in plan.modules
    ]
    kept = [m for m in modules if m.category != "boundary" or m.inputs or m.outputs or m.edits]
    parameters = tuple(replace(entry, grad_axes=(), grad_levels=0) for entry in plan.parameters)
    return replace(plan, modules=tuple(kept), parameters=parameters, training=None, inference_only=why)


def _steps(steps: Sequence[Boundary]) -> tuple[Boundary, ...]:
    return tuple(map(_without_gradient, in_use(steps, training=False)))


def _without_gradient(step: Boundary) -> Boundary:
    if isinstance(step, AllReduceStep):
        return replace(step, grad_axes=())
    if isinstance(step, AllGatherStep | SliceStep):
        return replace(step, grad_axes=(), local_grad_axes=())
    return step


@dataclass(frozen=True)
class Solution:
    """The placement of every tensor, and all that makes the model's own code run on it."""

    layouts: Layouts
    edits: Mapping[Attribute, AttributeEdit]
    norms: Mapping[str, NormInfo]
    """FQN of each norm over a sharded dim."""
    folded: Folded
    """The folded tape that was solved: which layers stand for which."""
    ruled_out: Mapping[Node, str]
    """Leaves that must stay replicated -> the call that does not work on shards of them."""
    gradients: Gradients

    @property
    def analysis(self) -> Analysis:
        """Dims of the traced model."""
        return self.layouts.analysis

    def fqn(self, event: Op | Mark) -> str:
        """The module that an event happens in."""
        return self.analysis.tape.calls[event.call].fqn

    def per_token(self, tid: int) -> int:
        """Elements of a tensor, global, for each token."""
        return math.ceil(math.prod(self.analysis.tape.tensors[tid].shape) / self.layouts.num_tokens)

    def placement(self, tid: int, axis: int) -> str:
        """What a tensor is on a mesh axis."""
        return placement(self.analysis, self.layouts.assignment, tid, axis)

    def reduced_axes(self, mark: Mark) -> tuple[int, ...]:
        """Mesh axes over which a mark sums its tensor."""
        assignment, partial = self.layouts.assignment, self.analysis.partial
        after = assignment.partial_axes(partial[mark.target])
        return tuple(a for a in assignment.partial_axes(partial[mark.source]) if a not in after)

    def kept_axes(self, mark: Mark) -> tuple[int, ...]:
        """Mesh axes over which a mark makes its tensor a term of a sum."""
        assignment, partial = self.layouts.assignment, self.analysis.partial
        before = assignment.partial_axes(partial[mark.source])
        return tuple(a for a in assignment.partial_axes(partial[mark.target]) if a not in before)

    def sharded(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """Those of some leaves that are sharded, each once."""
        return tuple(x for x in dict.fromkeys(nodes) if self.layouts.assignment.axes(x))


def stand_in(name: str, stand_ins: Mapping[str, str]) -> str:
    """The parameter of a layer that was solved, for one of a layer like it.

    Args:
        name: FQN of a parameter.
        stand_ins: FQNs of layers -> the layer that was solved in their place.
    """
    layer = next((p for p in prefixes(name) if p in stand_ins), "")
    return stand_ins[layer] + name[len(layer) :] if layer else name
