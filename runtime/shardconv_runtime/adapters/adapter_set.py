"""The adapters that a model is loaded with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..comm.mesh import Launch
from ..errors import PlanError
from ..format.module_steps import AllGatherStep
from ..format.plan import (
    DrawPlan,
    GradientPlan,
    HookPlan,
    ModulePlan,
    ParameterPlan,
    Plan,
    SequencePlan,
    TrainingPlan,
    by_name,
    global_shape,
    parameter_plans,
)
from ..format.plan_json import of_stage
from ..format.slices import Mesh, Rows
from ..format.stage_names import held_names
from ..format.stored_layout import holds_values, tensor_name
from ..parallel.build import stored_tensors
from ..parallel.local_modules import local_tensor
from .adapter_files import Given, PlannedAdapter, read_adapters
from .adapter_names import is_of_adapter, renamed
from .attaching import Adapter, Attached, attach

_Entry = TypeVar("_Entry", ParameterPlan, ModulePlan, GradientPlan, DrawPlan)


def named(plan: Plan, name: str) -> Plan:
    """Return the plan of a model with an adapter that has a name."""

    def change(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(e, names=tuple(renamed(pattern, name) for pattern in e.names)) for e in entries)

    def of_sequence(form: SequencePlan | None) -> SequencePlan | None:
        return form and replace(
            form,
            modules=change(form.modules),
            gradients=change(form.gradients),
            draws=change(form.draws),
            hooks=change(form.hooks),
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
        hooks=change(plan.hooks),
        attentions=change(plan.attentions),
        stages=plan.stages and replace(plan.stages, modules=change(plan.stages.modules)),
    )


@dataclass(frozen=True)
class Alone:
    """One adapter in the model, without the others."""

    plan: Plan
    """The plan of the model with the adapter, under the adapter's name."""
    model: nn.Module
    base_names: Mapping[str, str]
    """See ``Attached``."""


def combined(alone: Mapping[str, Alone], model: nn.Module, attached: Attached) -> Plan:
    """Return the plan of a model with several adapters.

    Where an adapter wraps a layer, the layer's steps may have moved to the wrapper: a model with several
    adapters takes the entry of a module from the plan of an adapter that wraps it, if any does. All of these
    plans must say the same.
    """
    union = _Union(alone, model, attached)
    plans = [each.plan for each in alone.values()]
    first = plans[0]
    if any(_stages(plan) != _stages(first) for plan in plans):
        raise PlanError(
            "the adapters change the outputs or messages of stages in different ways; load them one by one"
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
        hooks=_hooks([plan.hooks for plan in plans]),
        wrong_experts=tuple(dict.fromkeys(w for plan in plans for w in plan.wrong_experts)),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
    )


def _stages(plan: Plan) -> object:
    """Return the modules that stages have and the results that they send, in both forms."""
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
        return self._entries(
            lambda plan: plan.parameters, names, lambda e: (e.dims, e.dtype, e.packing, e.partial)
        )

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
            candidates = [entries[name].get(theirs) for name, theirs in self._candidates(fqn)]
            if len({entry and essence(entry) for entry in candidates}) > 1:
                raise PlanError(
                    f"{fqn}: the plans of the adapters {', '.join(self.alone)} differ there; load them one "
                    "by one, or train them on the same layers"
                )
            if candidates and candidates[0] is not None:
                out.append(replace(candidates[0], names=(fqn,)))
        return tuple(out)

    def _candidates(self, fqn: str) -> list[tuple[str, str]]:
        """Return the adapters whose plans are asked about a module or parameter, and its name there."""
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


def _logits(plans: list[Plan], modules: tuple[ModulePlan, ...]) -> Any:
    entries = by_name("modules", modules)
    for plan in plans:
        logits = plan.logits
        steps = entries[logits.module].outputs if logits is not None and logits.module in entries else ()
        if logits and any(isinstance(step, AllGatherStep) and step.port == logits.port for step in steps):
            return logits
    return None


def _training(plans: list[Plan], union: _Union) -> TrainingPlan | None:
    forms = [plan.training for plan in plans]
    present = [form for form in forms if form is not None]
    if len(present) < len(forms):
        return None
    sequences = [form.sequence for form in present]
    sequence = None
    if all(sequences):
        with suppress(PlanError):  # they gather in different places: there is none with all adapters
            sequence = SequencePlan(
                union.entries(lambda plan: plan.training.sequence.modules),  # type: ignore[union-attr]
                union.gradients(lambda plan: plan.training.sequence.gradients),  # type: ignore[union-attr]
                union.entries(lambda plan: plan.training.sequence.draws),  # type: ignore[union-attr]
                may_pad=all(s is not None and s.may_pad for s in sequences),
                stages=sequences[0].stages if sequences[0] is not None else (),
                hooks=_hooks([s.hooks for s in sequences if s is not None]),
            )
    return TrainingPlan(
        sequence,
        parallel_loss=all(form.parallel_loss for form in present),
        draws=union.entries(lambda plan: plan.training.draws),  # type: ignore[union-attr]
        extra_outputs=tuple(
            e for e in present[0].extra_outputs if all(e in f.extra_outputs for f in present)
        ),
        draws_on_host=all(form.draws_on_host for form in present),
    )


def _hooks(of_each: list[tuple[HookPlan, ...]]) -> tuple[HookPlan, ...]:
    """Return the modules on which all plans allow hooks, and give them the same."""
    first, *rest = [
        {name: replace(entry, names=(name,)) for name, entry in by_name("hooks", hooks).items()}
        for hooks in of_each
    ]
    return tuple(entry for name, entry in first.items() if all(other.get(name) == entry for other in rest))


def require_base(base: Plan, plan: Plan, attached: Attached) -> None:
    """Check that a plan of a model with adapters leaves the model's tensors as they are in its files."""
    entries, stored = parameter_plans(plan), parameter_plans(base)
    for now, old in attached.base_names.items():
        entry, before = entries.get(now), stored.get(old)
        if entry is None or before is None:
            continue
        same = (entry.dims, entry.dtype, entry.packing) == (before.dims, before.dtype, before.packing)
        if plan.mesh != base.mesh or not same or not set(before.partial) <= set(entry.partial):
            raise PlanError(
                f"{old}: the adapter was adapted for another conversion of the model, which lays it out in "
                "another way; run `shardconv adapt` for this one"
            )


def adapted_tensors(
    stored: Generator[tuple[str, Tensor]],
    base: Plan,
    plan: Plan,
    attached: Attached,
    start: Launch,
    rows: Rows,
) -> Generator[tuple[str, Tensor]]:
    """Yield the names in a model with adapters, and local tensors on the device.

    Args:
        stored: names in the model without them, and its local tensors; it is closed.
        rows: name of an adapter's tensor -> positions of the first dim of the local tensor.
    """
    entries, before = parameter_plans(plan), parameter_plans(base)
    now = _present_names(before, entries, attached)
    copies: dict[str, list[str]] = {}
    for name, old in attached.copies.items():
        if name in entries and name not in attached.tensors:  # otherwise an alias, or it was saved
            copies.setdefault(old, []).append(name)
    with closing(stored) as tensors:
        for old, tensor in tensors:
            for name in copies.get(old, ()):
                yield name, _kept(entries[name], before[old], tensor.clone(), plan.mesh, start.rank)
            name = now.get(old, old)
            if name in attached.tensors:
                continue  # the adapter has another one
            if name in entries and old in before:
                tensor = _kept(entries[name], before[old], tensor, plan.mesh, start.rank)
            yield name, tensor
    for name, tensor in local_parts(attached.tensors.items(), plan, start.rank):
        first, last = rows.get(name, (0, None))
        yield name, (tensor[first:last] if name in rows else tensor).to(start.device)


def _present_names(
    before: Mapping[str, ParameterPlan], entries: Mapping[str, ParameterPlan], attached: Attached
) -> dict[str, str]:
    """Return the names of stored tensors of a model without adapters, and with them."""
    present_names: dict[str, str] = {}
    for name, old in attached.base_names.items():
        if name in entries and old in before:
            packing = before[old].packing
            tensors = [tensor.name for tensor in packing.tensors] if packing is not None else []
            present_names |= {tensor_name(old, tensor): tensor_name(name, tensor) for tensor in tensors} or {
                old: name
            }
    return present_names


def local_parts(
    tensors: Iterable[tuple[str, Tensor]], plan: Plan, rank: int
) -> Generator[tuple[str, Tensor]]:
    """Yield the names and local parts, in their own memory, of global tensors that a plan knows."""
    entries = parameter_plans(plan)
    for name, tensor in tensors:
        entry = entries.get(name)
        if entry is None:
            continue  # an alias
        if tuple(tensor.shape) != global_shape(entry):
            raise PlanError(
                f"{name} is {list(tensor.shape)}, and {list(global_shape(entry))} in the plan; run "
                "`shardconv adapt` for this adapter again"
            )
        part = local_tensor(entry, tensor, plan.mesh, rank)
        is_view = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        yield name, part.clone() if is_view else part


def _kept(entry: ParameterPlan, before: ParameterPlan, tensor: Tensor, mesh: Mesh, rank: int) -> Tensor:
    """Return an entry in which a term of a sum is zeros on all ranks but one."""
    is_term = entry.partial != before.partial
    return torch.zeros_like(tensor) if is_term and not holds_values(entry, mesh, rank) else tensor


@dataclass(frozen=True)
class AdapterSet:
    """Adapters of one model, and its plan with all of them."""

    base: Plan
    """The plan of the model without them."""
    plan: Plan
    """The plan of the model with them."""
    adapters: Mapping[str, PlannedAdapter]
    """The adapters by name; the first one is active."""

    @staticmethod
    def read(given: Given, base: Plan, build: Callable[[], nn.Module]) -> AdapterSet:
        """Read them from their directories.

        Args:
            build: makes the model, global, on meta; called if there are several.
        """
        return AdapterSet.of(read_adapters(given), base, build)

    @staticmethod
    def of(adapters: Mapping[str, PlannedAdapter], base: Plan, build: Callable[[], nn.Module]) -> AdapterSet:
        """Make a set of one or several adapters; see ``read`` for arguments and errors."""
        for name, each in adapters.items():
            if (each.plan.mesh, each.plan.experts) != (base.mesh, base.experts):
                raise PlanError(
                    f"the adapter {name!r} ({each.adapter}) was adapted for another conversion, for "
                    f"{each.plan.tp} ranks; run `shardconv adapt` for this one, for {base.tp}"
                )
            if _layers(each.plan) != _layers(base):
                raise PlanError(
                    f"the adapter {name!r} ({each.adapter}) was adapted for a conversion of other stages; "
                    "run `shardconv adapt` for this one"
                )
        plans = {name: named(each.plan, name) for name, each in adapters.items()}
        if len(plans) == 1:
            return AdapterSet(base, next(iter(plans.values())), adapters)
        alone = {}
        for name, each in adapters.items():
            model = build()
            names = attach(model, {name: each.adapter}, trainable=True).base_names
            alone[name] = Alone(plans[name], model, names)
        model = build()
        attached = attach(model, _sources(adapters), trainable=True)
        return AdapterSet(base, combined(alone, model, attached), adapters)

    @property
    def content(self) -> str:
        """Return a text that is equal for equal adapters under equal names in equal order."""
        return ", ".join(f"{name}: {each.content}" for name, each in self.adapters.items())

    def attach(self, model: nn.Module, *, trainable: bool) -> Attached:
        """Put them into a model on meta, in place; arguments and errors as for ``attach``."""
        attached = attach(model, _sources(self.adapters), trainable=trainable)
        require_base(self.base, self.plan, attached)
        # A plan of an earlier version may have a training part all the same.
        if trainable and attached.not_trained and self.base.tp > 1:
            raise PlanError(f"the model cannot be trained on ranks: {attached.not_trained}")
        return attached

    def of_stages(self, stages: Collection[int], attached: Attached) -> tuple[AdapterSet, Attached]:
        """Return the parts of the set and of the attached adapters that a process needs for its stages."""
        names_in_stages = held_names(self.base, stages)
        names = {now: names_in_stages.get(old, old) for now, old in attached.base_names.items()}
        copies = {name: names_in_stages.get(old, old) for name, old in attached.copies.items()}
        set_of_stages = replace(self, base=of_stage(self.base, stages), plan=of_stage(self.plan, stages))
        return set_of_stages, replace(attached, base_names=names, copies=copies)

    def tensors(
        self,
        stored: Callable[[Rows], Generator[tuple[str, Tensor]]],
        attached: Attached,
        start: Launch,
        rows: Rows,
    ) -> Generator[tuple[str, Tensor]]:
        """Return the local tensors of the model with adapters by their names in it, on the device."""
        old = {attached.base_names.get(name, name): ranges_of_rows for name, ranges_of_rows in rows.items()}
        old |= {
            attached.copies[name]: ranges_of_rows
            for name, ranges_of_rows in rows.items()
            if name in attached.copies
        }
        return adapted_tensors(stored(old), self.base, self.plan, attached, start, rows)


def _layers(plan: Plan) -> object:
    """Return the layers of each stage."""
    return None if plan.stages is None else plan.stages.layers


def _sources(adapters: Mapping[str, PlannedAdapter]) -> dict[str, Adapter]:
    return {name: each.adapter for name, each in adapters.items()}
