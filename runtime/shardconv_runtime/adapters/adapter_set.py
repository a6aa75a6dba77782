"""The adapters that a model is loaded with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..comm.mesh import Launch
from ..errors import PlanError
from ..format.plan import Plan
from ..format.slices import Rows
from ..format.stage_part import of_stage
from ..format.staged_names import held_names
from .adapted_tensors import adapted_tensors, require_base
from .attaching import Adapter, Attached, attach
from .combined import Alone, combined, named
from .directory import Given, PlannedAdapter, read_adapters


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
