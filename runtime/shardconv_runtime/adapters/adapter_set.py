"""The adapters that a model is loaded with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..comm.mesh import Launch
from ..errors import PlanError
from ..format.packed_layout import tensor_name
from ..format.plan import ParameterPlan, Plan, global_shape, parameter_plans
from ..format.slices import Mesh, Rows
from ..format.stage_part import of_stage
from ..format.staged_names import held_names
from ..format.stored_layout import holds_values
from ..parallel.local_modules import local_tensor
from .adapter_files import Given, PlannedAdapter, read_adapters
from .attaching import Adapter, Attached, attach
from .combined import Alone, combined, named

# The local tensors of a model with adapters: those of the model's files, and parts of the adapters'.


def require_base(base: Plan, plan: Plan, attached: Attached) -> None:
    """Check that a plan of a model with adapters leaves the model's tensors as they are in its files.

    Raises:
        PlanError: it was made for another conversion.
    """
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
    """Names in a model with adapters, and local tensors on the device.

    Args:
        stored: names in the model without them, and its local tensors; it is closed.
        base: plan of the model without adapters.
        plan: of the model with them.
        attached: the adapters.
        start: this rank.
        rows: of the adapters' tensors with these names, positions of the first dim of the local tensor.
    """
    entries, before = parameter_plans(plan), parameter_plans(base)
    now = _present_names(before, entries, attached)
    copies: dict[str, list[str]] = {}
    for name, old in attached.copies.items():
        if name in entries and name not in attached.tensors:  # else an alias, or it was saved
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
    """Names of stored tensors of a model without adapters, and with them."""
    found: dict[str, str] = {}
    for name, old in attached.base_names.items():
        if name in entries and old in before:
            packing = before[old].packing
            tensors = [tensor.name for tensor in packing.tensors] if packing is not None else []
            found |= {tensor_name(old, tensor): tensor_name(name, tensor) for tensor in tensors} or {
                old: name
            }
    return found


def local_parts(
    tensors: Iterable[tuple[str, Tensor]], plan: Plan, rank: int
) -> Generator[tuple[str, Tensor]]:
    """Names and local parts, in memory of their own, of global tensors that a plan knows.

    Raises:
        PlanError: one has another shape than in the plan.
    """
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
    """A tensor that becomes a term of a sum is zeros on all ranks but one."""
    is_term = entry.partial != before.partial
    return torch.zeros_like(tensor) if is_term and not holds_values(entry, mesh, rank) else tensor


@dataclass(frozen=True)
class AdapterSet:
    """Adapters of one model, and its plan with all of them."""

    base: Plan
    """Of the model without them."""
    plan: Plan
    """Of the model with them."""
    adapters: Mapping[str, PlannedAdapter]
    """By name; the first one is active."""

    @staticmethod
    def read(given: Given, base: Plan, build: Callable[[], nn.Module]) -> AdapterSet:
        """Read them from their directories.

        Args:
            given: the directories.
            base: the plan of the model without them.
            build: makes the model, global, on meta; called where there are several.

        Raises:
            ShardconvError: see ``read_adapters``, ``attach`` and ``combined``.
        """
        return AdapterSet.of(read_adapters(given), base, build)

    @staticmethod
    def of(adapters: Mapping[str, PlannedAdapter], base: Plan, build: Callable[[], nn.Module]) -> AdapterSet:
        """Several, or one; arguments and errors as for ``read``."""
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
        """The same text for the same adapters under the same names in the same order."""
        return ", ".join(f"{name}: {each.content}" for name, each in self.adapters.items())

    def attach(self, model: nn.Module, *, trainable: bool) -> Attached:
        """Put them into a model on meta, in place; arguments and errors as for ``attach``.

        Raises:
            PlanError: they were adapted for another conversion.
        """
        attached = attach(model, _sources(self.adapters), trainable=trainable)
        require_base(self.base, self.plan, attached)
        return attached

    def of_stages(self, stages: Collection[int], attached: Attached) -> tuple[AdapterSet, Attached]:
        """What a process needs of them, and of what was attached, by the names in the model of its stages."""
        held = held_names(self.base, stages)
        names = {now: held.get(old, old) for now, old in attached.base_names.items()}
        copies = {name: held.get(old, old) for name, old in attached.copies.items()}
        own = replace(self, base=of_stage(self.base, stages), plan=of_stage(self.plan, stages))
        return own, replace(attached, base_names=names, copies=copies)

    def tensors(
        self,
        stored: Callable[[Rows], Generator[tuple[str, Tensor]]],
        attached: Attached,
        start: Launch,
        rows: Rows,
    ) -> Generator[tuple[str, Tensor]]:
        """The local tensors of the model with adapters by their names in it, on the device.

        Args:
            stored: gives those of the model by their names without adapters, or rows of them.
            attached: the adapters.
            start: this rank.
            rows: names with adapters -> the positions of the first dim of which the rank gets the tensor.
        """
        old = {attached.base_names.get(name, name): held for name, held in rows.items()}
        old |= {attached.copies[name]: held for name, held in rows.items() if name in attached.copies}
        return adapted_tensors(stored(old), self.base, self.plan, attached, start, rows)


def _layers(plan: Plan) -> object:
    """Of each stage."""
    return None if plan.stages is None else plan.stages.layers


def _sources(adapters: Mapping[str, PlannedAdapter]) -> dict[str, Adapter]:
    return {name: each.adapter for name, each in adapters.items()}
