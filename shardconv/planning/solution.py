"""A solved and localized model, before it is written as a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardconv_runtime.format.module_steps import AllGatherStep, AllReduceStep, ModuleStep, SliceStep
from shardconv_runtime.format.plan import HookPort, NormInfo, Plan
from shardconv_runtime.parallel.boundary import in_use

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Node
from ..tracing.fold import Folded
from ..tracing.tape import Mark, Op, prefixes
from .gradients import Gradients, placement
from .layout import Layouts
from .localize import Attribute, SolvedOverride


def inference_only(plan: Plan, why: str = "") -> Plan:
    """Remove everything that is for training from a plan."""
    modules = [
        replace(entry, inputs=without_gradients(entry.inputs), outputs=without_gradients(entry.outputs))
        for entry in plan.modules
    ]
    remaining = [m for m in modules if m.category != "boundary" or m.inputs or m.outputs or m.overrides]
    parameters = tuple(replace(entry, grad_axes=(), grad_levels=0) for entry in plan.parameters)
    hooks = tuple(
        replace(entry, inputs=_without_axes(entry.inputs), outputs=_without_axes(entry.outputs))
        for entry in plan.hooks
    )
    return replace(
        plan, modules=tuple(remaining), parameters=parameters, training=None, inference_only=why, hooks=hooks
    )


def without_gradients(steps: Sequence[ModuleStep]) -> tuple[ModuleStep, ...]:
    """Return the steps as a plan for inference has them."""
    return tuple(map(_without_gradient, in_use(steps, training=False)))


def _without_axes(ports: Sequence[HookPort]) -> tuple[HookPort, ...]:
    return tuple(replace(port, grad_axes=()) for port in ports)


def _without_gradient(step: ModuleStep) -> ModuleStep:
    if isinstance(step, AllReduceStep):
        return replace(step, grad_axes=())
    if isinstance(step, AllGatherStep | SliceStep):
        return replace(step, grad_axes=(), local_grad_axes=())
    return step


@dataclass(frozen=True)
class Solution:
    """The placement of every tensor, and the overrides with which the model's own code runs on it."""

    layouts: Layouts
    overrides: Mapping[Attribute, SolvedOverride]
    norms: Mapping[str, NormInfo]
    """FQN of each norm over a sharded dim."""
    folded: Folded
    """The folded tape that was solved, with the layers that represent others."""
    ruled_out: Mapping[Node, str]
    """Leaves that must stay replicated -> the call that does not work on shards of them."""
    gradients: Gradients

    @property
    def analysis(self) -> Analysis:
        """Dims of the traced model."""
        return self.layouts.analysis

    def fqn(self, event: Op | Mark) -> str:
        """Return the FQN of the module in which an event happens."""
        return self.analysis.tape.calls[event.call].fqn

    def per_token(self, tid: int) -> int:
        """Return the global elements of a tensor per token."""
        return math.ceil(math.prod(self.analysis.tape.tensors[tid].shape) / self.layouts.num_tokens)

    def placement(self, tid: int, axis: int) -> str:
        """Return the placement of a tensor on a mesh axis."""
        return placement(self.analysis, self.layouts.assignment, tid, axis)

    def reduced_axes(self, mark: Mark) -> tuple[int, ...]:
        """Return the mesh axes over which a mark sums its tensor."""
        assignment, partial = self.layouts.assignment, self.analysis.partial
        after = assignment.partial_axes(partial[mark.target])
        return tuple(a for a in assignment.partial_axes(partial[mark.source]) if a not in after)

    def kept_axes(self, mark: Mark) -> tuple[int, ...]:
        """Return the mesh axes over which a mark makes its tensor partial."""
        assignment, partial = self.layouts.assignment, self.analysis.partial
        before = assignment.partial_axes(partial[mark.source])
        return tuple(a for a in assignment.partial_axes(partial[mark.target]) if a not in before)

    def sharded(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """Return the leaves that are sharded, each once."""
        return tuple(x for x in dict.fromkeys(nodes) if self.layouts.assignment.axes(x))


def stand_in(name: str, stand_ins: Mapping[str, str]) -> str:
    """Map the name of a parameter to its counterpart in the layer that was solved."""
    layer = next((p for p in prefixes(name) if p in stand_ins), "")
    return stand_ins[layer] + name[len(layer) :] if layer else name
