"""One plan for several adapters of a model, from the plan for each of them.

Where an adapter wraps a layer, the layer's steps may have moved to the wrapper: a model with several
adapters takes what a plan says of a module from an adapter that wraps it, if any does. All of these plans
must say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from ..errors import PlanError
from ..format.plan import (
    DrawPlan,
    GradientPlan,
    ModulePlan,
    ParameterPlan,
    Plan,
    SequencePlan,
    TrainingPlan,
    by_name,
)
from ..format.slot_steps import AllGatherStep
from ..parallel.build import stored_tensors
from .adapter_names import is_of_adapter, renamed
from .attaching import Attached

_Entry = TypeVar("_Entry", ParameterPlan, ModulePlan, GradientPlan, DrawPlan)


def named(plan: Plan, name: str) -> Plan:
    """The plan of a model with an adapter that has a name."""

    def change(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(e, names=tuple(renamed(pattern, name) for pattern in e.names)) for e in entries)

    def of_sequence(form: SequencePlan | None) -> SequencePlan | None:
        return form and replace(
            form, modules=change(form.modules), gradients=change(form.gradients), draws=change(form.draws)
        )

    training = plan.training and replace(
        plan.training, draws=change(plan.training.draws), sequence=of_sequence(plan.training.sequence)
    )
    return replace(
        plan,
        parameters=change(plan.parameters),
        modules=change(plan.modules),
        tied=tuple((renamed(alias, name), renamed(first, name)) for alias, first in plan.tied),
        logits=plan.logits and replace(plan.logits, module=renamed(plan.logits.module, name)),
        training=training,
        stages=plan.stages and replace(plan.stages, modules=change(plan.stages.modules)),
    )


@dataclass(frozen=True)
class Alone:
    """One adapter in the model, without the others."""

    plan: Plan
    """With the adapter's name."""
    model: nn.Module
    base_names: Mapping[str, str]
    """See ``Attached``."""


def combined(alone: Mapping[str, Alone], model: nn.Module, attached: Attached) -> Plan:
    """The plan of a model with several adapters.

    Args:
        alone: by the names of the adapters.
        model: with all of them, on meta.
        attached: what was attached to it.

    Raises:
        PlanError: the plans differ in a module, or some have no form that others have.
    """
    union = _Union(alone, model, attached)
    plans = [each.plan for each in alone.values()]
    first = plans[0]
    if any(_stages(plan) != _stages(first) for plan in plans):
        raise PlanError(
            "the adapters change what modules of stages return or send in different ways; load them one by "
            "one"
        )
    for what in ("mesh", "tp", "experts"):
        if any(getattr(plan, what) != getattr(first, what) for plan in plans):
            raise PlanError(f"the adapters were adapted for conversions of another {what}")
    modules = union.entries(lambda plan: plan.modules)
    return replace(
        first,
        parameters=union.parameters(),
        modules=modules,
        tied=union.tied(),
        logits=_logits(plans, modules),
        fused=(),
        training=_training(plans, union),
        inference_only=next((plan.inference_only for plan in plans if plan.inference_only), ""),
        proven_arguments=tuple(
            a for a in first.proven_arguments if all(a in plan.proven_arguments for plan in plans)
        ),
        left_out=tuple(dict.fromkeys(name for plan in plans for name in plan.left_out)),
        wrong_attention=tuple(dict.fromkeys(w for plan in plans for w in plan.wrong_attention)),
        wrong_experts=tuple(dict.fromkeys(w for plan in plans for w in plan.wrong_experts)),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
    )


def _stages(plan: Plan) -> object:
    """What stages have and send, in both forms."""
    sequence = plan.training.sequence if plan.training is not None else None
    return plan.stages and (plan.stages.modules, sequence and sequence.stages)


class _Union:
    def __init__(self, alone: Mapping[str, Alone], model: nn.Module, attached: Attached) -> None:
        self.alone = alone
        self.base_names = attached.base_names
        self.modules = dict(model.named_modules())
        stored = dict(stored_tensors(model))
        firsts = {id(tensor): name for name, tensor in reversed(list(stored.items()))}
        self.first_names = {name: firsts[id(tensor)] for name, tensor in stored.items()}
        # The first name of each tensor, under which plans have it: a tied one has others.
        self.now = {
            name: {old: n for n, old in reversed(list(each.base_names.items()))}
            for name, each in alone.items()
        }
        self.present = {
            name: {*dict(each.model.named_modules()), *dict(stored_tensors(each.model))}
            for name, each in alone.items()
        }

    def tied(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, first) for name, first in self.first_names.items() if name != first)

    def parameters(self) -> tuple[ParameterPlan, ...]:
        names = dict.fromkeys(self.first_names.values())
        return self._entries(lambda plan: plan.parameters, names, _stored)

    def entries(self, of: Callable[[Plan], tuple[_Entry, ...]]) -> tuple[_Entry, ...]:
        return self._entries(of, self.modules, lambda entry: replace(entry, names=()))

    def gradients(self, of: Callable[[Plan], tuple[GradientPlan, ...]]) -> tuple[GradientPlan, ...]:
        return self._entries(
            of, dict.fromkeys(self.first_names.values()), lambda entry: replace(entry, names=())
        )

    def _entries(
        self,
        of: Callable[[Plan], tuple[_Entry, ...]],
        names: Iterable[str],
        essence: Callable[[_Entry], object],
    ) -> tuple[_Entry, ...]:
        entries = {name: by_name("entries", of(each.plan)) for name, each in self.alone.items()}
        out = []
        for fqn in names:
            found = [entries[name].get(theirs) for name, theirs in self._candidates(fqn)]
            if len({entry and essence(entry) for entry in found}) > 1:
                raise PlanError(
                    f"{fqn}: the plans of the adapters {', '.join(self.alone)} differ there; load them one "
                    "by one, or train them on the same layers"
                )
            if found and found[0] is not None:
                out.append(replace(found[0], names=(fqn,)))
        return tuple(out)

    def _candidates(self, fqn: str) -> list[tuple[str, str]]:
        """The adapters whose plans are asked about a module or parameter, and its name there."""
        for name in self.alone:
            if is_of_adapter(fqn, name) and fqn not in self.base_names:
                return [(name, fqn)]
        if fqn not in self.base_names:
            have = [name for name in self.alone if fqn in self.present[name]]
            return [(name, fqn) for name in have if fqn not in self.alone[name].base_names]
        old = self.base_names[fqn]
        all_names = [(name, self.now[name][old]) for name in self.alone]
        moved = [(name, theirs) for name, theirs in all_names if theirs != old]
        return moved if fqn != old else all_names


def _stored(entry: ParameterPlan) -> object:
    return entry.dims, entry.dtype, entry.packing, entry.partial


def _logits(plans: list[Plan], modules: tuple[ModulePlan, ...]) -> Any:
    entries = by_name("modules", modules)
    for plan in plans:
        found = plan.logits
        steps = entries[found.module].outputs if found is not None and found.module in entries else ()
        if found and any(isinstance(step, AllGatherStep) and step.slot == found.slot for step in steps):
            return found
    return None


def _training(plans: list[Plan], union: _Union) -> TrainingPlan | None:
    forms = [plan.training for plan in plans]
    known = [form for form in forms if form is not None]
    if len(known) < len(forms):
        return None
    sequences = [form.sequence for form in known]
    sequence = None
    if all(sequences):
        with suppress(PlanError):  # they gather in different places: there is none with all adapters
            sequence = SequencePlan(
                union.entries(lambda plan: plan.training.sequence.modules),  # type: ignore[union-attr]
                union.gradients(lambda plan: plan.training.sequence.gradients),  # type: ignore[union-attr]
                union.entries(lambda plan: plan.training.sequence.draws),  # type: ignore[union-attr]
                may_pad=all(s is not None and s.may_pad for s in sequences),
                stages=sequences[0].stages if sequences[0] is not None else (),
            )
    return TrainingPlan(
        sequence,
        parallel_loss=all(form.parallel_loss for form in known),
        draws=union.entries(lambda plan: plan.training.draws),  # type: ignore[union-attr]
        extra_outputs=tuple(e for e in known[0].extra_outputs if all(e in f.extra_outputs for f in known)),
    )
