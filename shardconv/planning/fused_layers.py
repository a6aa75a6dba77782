"""Linear layers that the model's code calls with one and the same tensor: their products become one product.

They are found on the tape: marks at the inputs of modules have one source where the code passes one tensor
on, and a write to it in between makes another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from ..tracing.fold import NUMBERED, Folded
from ..tracing.layer_kinds import Segment, alike, segments_of
from ..tracing.tape import Mark, Tape, prefixes, starred
from .obstacle import Obstacle, joined

# An obstacle in one layer is met in every layer that does the same: all of them are ruled out at once.
#
# Layers of a stack that could be folded are solved as one anyway. Those of other stacks, such as layers that
# write to states which the model made before, would each meet the obstacle in a round of their own.


@dataclass(frozen=True)
class PeerLayers:
    """The layers of one model that do the same."""

    analysis: Analysis

    def widened(self, obstacle: Obstacle) -> Obstacle:
        """The obstacle with the leaves that correspond to its own, in all layers like those of its own.

        Of those that were met with it, what blames some of these leaves is left out.
        """
        each = (obstacle, *obstacle.others)
        return joined(replace(one, nodes=self._widened(one.nodes), others=()) for one in each) or obstacle

    def _widened(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        found = dict.fromkeys(find(x) for node in nodes for x in leaves(node))
        for group in self._groups if found else ():
            found |= self._corresponding(group, found)
        return tuple(found) if found else tuple(nodes)

    @cached_property
    def _groups(self) -> list[list[Segment]]:
        """Calls of layers that do the same, inner ones first."""
        tape = self.analysis.tape
        siblings: dict[str, list[int]] = {}
        for index, call in enumerate(tape.calls):
            match = NUMBERED.fullmatch(call.fqn)
            if match:
                siblings.setdefault(match[1], []).append(index)
        groups = (alike(tape, segments_of(tape, calls)) for calls in reversed(siblings.values()))
        return [group for found in groups for group in found if len(group) > 1]

    def _corresponding(self, group: list[Segment], found: Iterable[Node]) -> dict[Node, None]:
        """The leaves of all layers of a group at the places where one of them has one of these."""
        wanted = set(found)
        places = {
            (position, dim, index)
            for layer in group
            for position, dim, index, leaf in self._leaves(layer)
            if leaf in wanted
        }
        return {
            leaf: None
            for layer in (group if places else ())
            for position, dim, index, leaf in self._leaves(layer)
            if (position, dim, index) in places
        }

    def _leaves(self, layer: Segment) -> Iterable[tuple[int, int, int, Node]]:
        """Each leaf of what a layer makes and reads, after its tensor, its dim, and its number in that."""
        dims = self.analysis.dims
        for position, tid in enumerate((*layer.made, *layer.outside)):
            for number, dim in enumerate(dims.get(tid, ())):
                for index, leaf in enumerate(leaves(dim)):
                    yield position, number, index, find(leaf)


Group = tuple[str, ...]
"""FQNs of linear layers, in the order of their calls."""


def fused_plans(plan: Plan, model: nn.Module, folded: Folded) -> tuple[FusedPlan, ...]:
    """The groups of exact ``nn.Linear`` modules that could be one layer with the parameters of all.

    Args:
        plan: without groups.
        model: the global model, on meta.
        folded: its tape.
    """
    layers = _Layers(
        model, parameter_plans(plan), module_plans(plan), {n for pair in plan.tied for n in pair}
    )
    found: list[Group] = []
    for called in _called_alike(folded.tape, model):
        alike: dict[object, list[str]] = {}
        for fqn in called:
            names = folded.names(fqn)
            if all(map(layers.may_be_fused, names)):
                alike.setdefault((len(names), layers.kind(fqn)), []).append(fqn)
        for members in alike.values():
            found += zip(*map(folded.names, members), strict=True) if len(members) > 1 else ()
    return as_entries(found)


def without_groups(plan: Plan, fqn: str) -> Plan:
    """The plan without the groups in a module and in those that are named alike; if it has none, without any.

    Args:
        plan: with groups.
        fqn: the module, or one inside of it.
    """
    inside = {starred(name) for name in prefixes(fqn)}
    kept = [g for g in fused_groups(plan) if starred(_parent(g)) not in inside]
    is_changed = len(kept) < len(fused_groups(plan))
    return replace(plan, fused=as_entries(kept) if is_changed else ())


def as_entries(groups: Iterable[Group]) -> tuple[FusedPlan, ...]:
    """Groups as they are written; those whose names differ in numbers alone share an entry."""
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


def _parent(group: Group) -> str:
    return group[0].rpartition(".")[0]


def _called_alike(tape: Tape, model: nn.Module) -> Iterator[list[str]]:
    """Linear layers that are called once, by the tensor that the caller gives them."""
    num_calls = Counter(call.fqn for call in tape.calls)
    called: dict[int, list[str]] = {}
    for event in tape.events:
        if isinstance(event, Mark) and not event.is_output:
            fqn = tape.calls[event.call].fqn
            if num_calls[fqn] == 1 and type(model.get_submodule(fqn)) is nn.Linear:
                called.setdefault(event.source, []).append(fqn)
    yield from (fqns for fqns in called.values() if len(fqns) > 1)


@dataclass(frozen=True)
class _Layers:
    """What a plan says of linear layers."""

    model: nn.Module
    parameters: Mapping[str, ParameterPlan]
    modules: Mapping[str, ModulePlan]
    tied: set[str]

    def may_be_fused(self, fqn: str) -> bool:
        """Whether a layer has a matrix, maybe a bias, of its own, and no steps but a gather of its output."""
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
        """What the members of a group have in common."""
        weight, bias = (self.parameters.get(f"{fqn}.{attribute}") for attribute in FUSED_PARAMETERS)
        return weight and (weight.dtype, is_common(weight)), bias and (bias.dtype, is_common(bias))
