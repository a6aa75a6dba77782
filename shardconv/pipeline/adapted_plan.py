"""The plan of a model with an adapter: that of the model, and what the adapter adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from shardconv_runtime.adapters.adapter_names import ANY_NAME
from shardconv_runtime.adapters.attaching import Adapter, Attached, attach
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.dims import to_text
from shardconv_runtime.format.name_patterns import compress
from shardconv_runtime.format.plan import (
    DrawPlan,
    ModulePlan,
    ParameterPlan,
    Plan,
    by_name,
    parameter_plans,
)
from torch import nn

from ..solving.pins import Given
from ..tracing.tape import starred

_Entry = TypeVar("_Entry", ParameterPlan, ModulePlan, DrawPlan)


@dataclass(frozen=True)
class Adaptation:
    """An adapter, and the plan of the model that it is for."""

    base: Plan
    """Its shards stay as they are."""
    adapter: Adapter

    def attached(self, model: nn.Module) -> AdaptedModel:
        """The model with the adapter.

        Args:
            model: of the plan, on meta; it is changed in place.

        Raises:
            SourceError: see ``attach``.
        """
        attached = attach(model, {ANY_NAME: self.adapter}, trainable=True, initialized=False)
        return AdaptedModel(self.base, attached)


@dataclass(frozen=True)
class AdaptedModel:
    """A model with its adapter, on meta."""

    base: Plan
    attached: Attached

    @property
    def given(self) -> Given:
        """The layouts of the model's parameters, and of copies that are trained in place of some."""
        entries = parameter_plans(self.base)
        names = {**self.attached.base_names, **self.attached.copies}
        return Given(self.base.mesh, {now: entries[old] for now, old in names.items() if old in entries})

    def planned(self, plan: Plan) -> Plan:
        """The plan, if it keeps the shards of the model.

        Raises:
            SolveError: a parameter of the model would have to be laid out in another way.
        """
        if plan.mesh != self.base.mesh:
            raise SolveError(
                f"with the adapter, the ranks would form a mesh {plan.mesh}, and without it they form "
                f"{self.base.mesh}; leave out layers of its target modules"
            )
        replaced = tuple(theirs for _, theirs in self._replaced())
        given = self.given.parameters
        for name, entry in parameter_plans(plan).items():
            if name in self.attached.base_names and not name.startswith(replaced):
                _require_kept(name, given[name], entry)
        return plan

    def stored(self, plan: Plan) -> Plan:
        """The plan, whose parameters of the model are stored as they were, for disabled adapters too."""
        plan = self._with_replaced_modules(plan)
        given = self.given.parameters

        def kept(name: str, entry: ParameterPlan) -> ParameterPlan:
            old = given.get(name) if name in self.attached.base_names else None
            return entry if old is None else replace(entry, dtype=old.dtype, packing=old.packing)

        entries = parameter_plans(plan).items()
        return replace(plan, parameters=_joined((name, kept(name, entry)) for name, entry in entries))

    def _with_replaced_modules(self, plan: Plan) -> Plan:
        """The plan, which says of modules that the adapter replaces what it says of their copies."""
        pairs = dict(self._replaced())
        if not pairs:
            return plan
        training = plan.training and replace(plan.training, draws=_extended(plan.training.draws, pairs))
        if training is not None and training.sequence is not None:
            sequence = training.sequence
            modules, draws = _extended(sequence.modules, pairs), _extended(sequence.draws, pairs)
            training = replace(training, sequence=replace(sequence, modules=modules, draws=draws))
        parameters = _extended(plan.parameters, pairs)
        return replace(plan, parameters=parameters, modules=_extended(plan.modules, pairs), training=training)

    def _replaced(self) -> Iterator[tuple[str, str]]:
        """FQNs of a copied module, and of the one that it replaces."""
        now = {old: name for name, old in reversed(list(self.attached.base_names.items()))}
        for copy, old in self.attached.copies.items():
            original = now[old]
            ours, theirs = copy.split("."), original.split(".")
            while ours and theirs and ours[-1] == theirs[-1]:
                ours.pop()
                theirs.pop()
            yield ".".join(ours), ".".join(theirs)

    @property
    def replaces_modules(self) -> bool:
        """Whether the adapter trains copies of some modules in place of these."""
        return bool(self.attached.copies)


def _require_kept(name: str, old: ParameterPlan, new: ParameterPlan) -> None:
    if new.dims != old.dims or not set(old.partial) <= set(new.partial):
        was, now = (", ".join(map(to_text, entry.dims)) for entry in (old, new))
        raise SolveError(
            f"{name}: the adapter would need it laid out as [{now}], and the model has it as [{was}]; leave "
            "its layer out of the adapter's target modules"
        )


def _extended(entries: tuple[_Entry, ...], pairs: Mapping[str, str]) -> tuple[_Entry, ...]:
    """Entries by name, with those of the first modules of pairs for the second ones too."""
    found = by_name("entries", entries)
    for name, entry in list(found.items()):
        for ours, theirs in pairs.items():
            if name == ours or name.startswith(f"{ours}."):
                found[theirs + name[len(ours) :]] = entry
    return _joined(found.items())


def _joined(entries: Iterable[tuple[str, _Entry]]) -> tuple[_Entry, ...]:
    """Entries by name; alike ones, whose names differ in numbers alone, are one."""
    grouped: dict[tuple[str, _Entry], list[str]] = {}
    for name, entry in entries:
        grouped.setdefault((starred(name), replace(entry, names=())), []).append(name)
    return tuple(replace(entry, names=tuple(compress(names))) for (_, entry), names in grouped.items())
