"""Plan a model with an adapter: keep the plan of the model, and add the adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from shardconv_runtime.adapters.adapter_names import ANY_NAME
from shardconv_runtime.adapters.attaching import Adapter, Attached, attach
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.dims import axes_of, to_text
from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import (
    DrawPlan,
    ModulePlan,
    ParameterPlan,
    Plan,
    by_name,
    parameter_plans,
)
from torch import nn

from .planning.solution import inference_only
from .planning.solve import Given
from .tracing.tape import starred

_Entry = TypeVar("_Entry", ParameterPlan, ModulePlan, DrawPlan)


@dataclass(frozen=True)
class Adaptation:
    """An adapter, and the plan of its base model."""

    base: Plan
    """Plan of the base model, whose shards stay as they are."""
    adapter: Adapter

    def attached(self, model: nn.Module) -> AdaptedModel:
        """Attach the adapter to the model."""
        attached = attach(model, {ANY_NAME: self.adapter}, trainable=True, initialized=False)
        return AdaptedModel(self.base, attached)


@dataclass(frozen=True)
class AdaptedModel:
    """A model with its adapter, on meta."""

    base: Plan
    attached: Attached

    @property
    def given(self) -> Given:
        """Return the layouts of the model's parameters, and of copies that are trained instead of some."""
        entries = parameter_plans(self.base)
        names = {**self.attached.base_names, **self.attached.copies}
        parameters = {now: entries[old] for now, old in names.items() if old in entries}
        copied = tuple(f"{module}." for module in self.attached.copied_modules().values())
        unread = frozenset(name for name in parameters if name.startswith(copied)) if copied else frozenset()
        return Given(self.base.mesh, parameters, unread)

    def planned(self, plan: Plan) -> Plan:
        """Return the plan if it keeps the model's shards; for inference only if ranks cannot train it."""
        if plan.mesh != self.base.mesh:
            raise SolveError(
                f"with the adapter, the ranks would form a mesh {plan.mesh}, and without it they form "
                f"{self.base.mesh}; leave out layers of its target modules"
            )
        solution = self.given
        for name, entry in parameter_plans(plan).items():
            if name in self.attached.base_names and name not in solution.unread:
                _require_kept(name, solution.parameters[name], entry)
        return inference_only(plan, self.attached.not_trained) if self.attached.not_trained else plan

    def with_copied_modules(self, plan: Plan) -> Plan:
        """Extend the plan from copies that the adapter makes of modules to the modules themselves.

        The trace only calls the copies. The modules themselves are called if the adapter is disabled.
        """
        pairs = self.attached.copied_modules()
        if not pairs:
            return plan
        training = plan.training and replace(plan.training, draws=_extended(plan.training.draws, pairs))
        if training is not None and training.sequence is not None:
            form = training.sequence
            form = replace(form, modules=_extended(form.modules, pairs), draws=_extended(form.draws, pairs))
            training = replace(training, sequence=form)
        # A tensor and its copy get the same layout, from the one that is read by some call. A tied tensor may
        # be read under its other names.
        parameters = dict(by_name("parameters", plan.parameters))
        for name in list(parameters):
            for ours, theirs in pairs.items():
                original = theirs + name.removeprefix(ours)
                if name.startswith(f"{ours}.") and original in parameters:
                    is_sharded = any(map(axes_of, parameters[original].dims))
                    parameters[name] = parameters[original] = parameters[original if is_sharded else name]
        return replace(
            plan,
            parameters=_joined(parameters.items()),
            modules=_extended(plan.modules, pairs),
            training=training,
        )

    def stored(self, plan: Plan) -> Plan:
        """Return the plan with the model's parameters stored as they were: layouts, packing and dtypes."""
        layouts = self.given.parameters

        def kept(name: str, entry: ParameterPlan) -> ParameterPlan:
            if name not in self.attached.base_names or name not in layouts:
                return entry
            _require_kept(name, layouts[name], entry)
            return replace(entry, dtype=layouts[name].dtype, packing=layouts[name].packing)

        plan = self.with_copied_modules(plan)
        entries = parameter_plans(plan).items()
        return replace(plan, parameters=_joined((name, kept(name, entry)) for name, entry in entries))


def _require_kept(name: str, old: ParameterPlan, new: ParameterPlan) -> None:
    if new.dims != old.dims or not set(old.partial) <= set(new.partial):
        was, now = (", ".join(map(to_text, entry.dims)) for entry in (old, new))
        raise SolveError(
            f"{name}: the adapter would need it laid out as [{now}], and the model has it as [{was}]; leave "
            "its layer out of the adapter's target modules"
        )


def _extended(entries: tuple[_Entry, ...], pairs: Mapping[str, str]) -> tuple[_Entry, ...]:
    """Copy the entries of the first modules of pairs to the second ones."""
    modules = by_name("entries", entries)
    for name, entry in list(modules.items()):
        for ours, theirs in pairs.items():
            if name == ours or name.startswith(f"{ours}."):
                modules[theirs + name[len(ours) :]] = entry
    return _joined(modules.items())


def _joined(entries: Iterable[tuple[str, _Entry]]) -> tuple[_Entry, ...]:
    """Group entries by name; equal entries whose names differ only in numbers become one."""
    grouped: dict[tuple[str, _Entry], list[str]] = {}
    for name, entry in entries:
        grouped.setdefault((starred(name), replace(entry, names=())), []).append(name)
    return tuple(replace(entry, names=tuple(compress(names))) for (_, entry), names in grouped.items())
