"""Find linear layers that the model's code calls with the same tensor. Their products become one product.

On the tape, the marks at their inputs have the same source. A write to the tensor in between makes a new
tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.fused_groups import FUSED_PARAMETERS, fused_groups, is_fusible
from shardconv_runtime.format.names import compress, expand_all, natural_key
from shardconv_runtime.format.plan import (
    FusedPlan,
    ModulePlan,
    ParameterPlan,
    Plan,
    module_plans,
    parameter_plans,
)
from shardconv_runtime.format.stored_layout import is_common
from torch import nn

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Node, find, leaves
from ..tracing.fold import NUMBERED, Folded, Segment, alike, segments_of
from ..tracing.tape import Mark, prefixes, starred
from .conflict import Conflict, joined

# A conflict in one layer occurs in every layer that does the same, so all of them are ruled out at once.
#
# Layers of a stack that was folded are solved as one anyway. In other stacks, such as layers that write to
# states of the model, each layer would need another round for the conflict.


@dataclass(frozen=True)
class PeerLayers:
    """Layers of a model that do the same."""

    analysis: Analysis

    def widened(self, conflict: Conflict) -> Conflict:
        """Add the leaves that correspond to the conflict's leaves in all layers that do the same.

        Other conflicts of the round that blame some of these leaves are dropped.
        """
        wider = []
        for each in (conflict, *conflict.others):
            nodes = dict.fromkeys(find(x) for node in each.nodes for x in leaves(node))
            for group in self._groups if nodes else ():
                nodes |= self._corresponding(group, nodes)
            wider.append(replace(each, nodes=tuple(nodes) or each.nodes, others=()))
        return joined(wider) or conflict

    @cached_property
    def _groups(self) -> list[list[Segment]]:
        """Return calls of layers that do the same, inner ones first."""
        tape = self.analysis.tape
        siblings: dict[str, list[int]] = {}
        for index, call in enumerate(tape.calls):
            match = NUMBERED.fullmatch(call.fqn)
            if match:
                siblings.setdefault(match[1], []).append(index)
        groups = (alike(tape, segments_of(tape, calls)) for calls in reversed(siblings.values()))
        return [group for members in groups for group in members if len(group) > 1]

    def _corresponding(self, group: list[Segment], found: Iterable[Node]) -> dict[Node, None]:
        """Return the leaves of all layers of a group at positions where one layer has one of these leaves."""
        layers = set(found)
        places = {
            (position, dim, index)
            for layer in group
            for position, dim, index, leaf in self._leaves(layer)
            if leaf in layers
        }
        return {
            leaf: None
            for layer in (group if places else ())
            for position, dim, index, leaf in self._leaves(layer)
            if (position, dim, index) in places
        }

    def _leaves(self, layer: Segment) -> Iterable[tuple[int, int, int, Node]]:
        """Yield each leaf of the tensors of a layer with the numbers of its tensor, its dim, and itself."""
        dims = self.analysis.dims
        for position, tid in enumerate((*layer.made, *layer.outside)):
            for number, dim in enumerate(dims.get(tid, ())):
                for index, leaf in enumerate(leaves(dim)):
                    yield position, number, index, find(leaf)


Group = tuple[str, ...]
"""FQNs of linear layers, in the order of their calls."""


def fused_plans(plan: Plan, model: nn.Module, folded: Folded) -> tuple[FusedPlan, ...]:
    """Find groups of ``nn.Linear`` modules that could be one layer with the parameters of all.

    Subclasses are left out, since their forward may do something else.

    Args:
        model: the global model, on meta.
    """
    layers = _Layers(
        model, parameter_plans(plan), module_plans(plan), {n for pair in plan.tied for n in pair}
    )
    # Linear layers that are called once, by the tensor with which they are called.
    num_calls = Counter(call.fqn for call in folded.tape.calls)
    by_source: dict[int, list[str]] = {}
    for event in folded.tape.events:
        if isinstance(event, Mark) and not event.is_output:
            fqn = folded.tape.calls[event.call].fqn
            if num_calls[fqn] == 1 and type(model.get_submodule(fqn)) is nn.Linear:
                by_source.setdefault(event.source, []).append(fqn)
    groups: list[Group] = []
    for called in (fqns for fqns in by_source.values() if len(fqns) > 1):
        alike: dict[object, list[str]] = {}
        for fqn in called:
            names = folded.names(fqn)
            if all(map(layers.may_be_fused, names)):
                alike.setdefault((len(names), layers.kind(fqn)), []).append(fqn)
        for members in alike.values():
            groups += zip(*map(folded.names, members), strict=True) if len(members) > 1 else ()
    return as_entries(groups)


def without_groups(plan: Plan, fqn: str) -> Plan:
    """Remove the groups in a module and in modules named like it. If it has none, remove all groups."""
    inside = {starred(name) for name in prefixes(fqn)}
    remaining = [g for g in fused_groups(plan) if starred(g[0].rpartition(".")[0]) not in inside]
    is_changed = len(remaining) < len(fused_groups(plan))
    return replace(plan, fused=as_entries(remaining) if is_changed else ())


def as_entries(groups: Iterable[Group]) -> tuple[FusedPlan, ...]:
    """Return groups as entries of a plan. Groups whose names differ only in numbers share an entry."""
    by_name: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        by_name.setdefault(tuple(map(starred, group)), []).append(group)
    entries: list[FusedPlan] = []
    for same in by_name.values():
        ordered = sorted(same, key=lambda group: natural_key(group[0]))
        columns = list(zip(*ordered, strict=True))
        members = tuple(map(compress, columns))
        if [tuple(expand_all(patterns)) for patterns in members] == columns:
            entries.append(FusedPlan(members))
        else:
            entries += (FusedPlan(tuple((fqn,) for fqn in group)) for group in ordered)
    return tuple(entries)


@dataclass(frozen=True)
class _Layers:
    """Linear layers of a plan."""

    model: nn.Module
    parameters: Mapping[str, ParameterPlan]
    modules: Mapping[str, ModulePlan]
    tied: set[str]

    def may_be_fused(self, fqn: str) -> bool:
        """Return whether a layer is not tied, and its only step is a gather of its output."""
        names = [f"{fqn}.{attribute}" for attribute in FUSED_PARAMETERS]
        entries = [self.parameters[name] for name in names if name in self.parameters]
        return (
            type(self.model.get_submodule(fqn)) is nn.Linear
            and names[0] in self.parameters
            and not self.tied.intersection(names)
            and not any(entry.partial or any(map(axes_of, entry.dims[1:])) for entry in entries)
            and (fqn not in self.modules or is_fusible(self.modules[fqn]))
        )

    def kind(self, fqn: str) -> object:
        """Return the properties that all members of a group must share."""
        weight, bias = (self.parameters.get(f"{fqn}.{attribute}") for attribute in FUSED_PARAMETERS)
        return weight and (weight.dtype, is_common(weight)), bias and (bias.dtype, is_common(bias))
