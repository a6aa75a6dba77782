"""The plan of a model whose vocabulary got another size.

A plan does not depend on the size of the vocabulary: it is proven on a smaller one. So the same dim gets
another size in the parameters that have it, and in the steps of their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ..errors import OptionError, RefusedCallError
from .dims import Dim, Leaf, size
from .module_steps import ModuleStep
from .names import compress
from .plan import GradientPlan, ModulePlan, ParameterPlan, Plan, by_name, global_shape, parameter_plans

BEFORE = "resize the unsharded model, save it, and convert it again"
Shapes = Mapping[str, tuple[int, ...]]
_Entry = TypeVar("_Entry", ParameterPlan, ModulePlan, GradientPlan)


@dataclass(frozen=True)
class _Resizing:
    before: int
    after: int

    def dim(self, where: str, dim: Dim) -> Dim:
        """Return a dim of the vocabulary with its new size."""
        if not isinstance(dim, Leaf):
            raise RefusedCallError(
                f"{where}: the vocabulary is laid out in several parts ({dim}), which cannot be resized on "
                f"ranks; {BEFORE}"
            )
        return Leaf(self.after, dim.axes)

    def step(self, where: str, step: ModuleStep) -> ModuleStep:
        """Return a step of a module that has a resized parameter."""
        layout = getattr(step, "layout", None)
        if layout is not None and size(layout) == self.before:
            step = replace(step, layout=self.dim(where, layout))  # type: ignore[arg-type]
        return replace(step, per_token=self.after) if step.per_token == self.before else step

    def module(self, entry: ModulePlan) -> ModulePlan:
        """Return the entry of a module that has a resized parameter."""
        where = entry.names[0]
        if any(override.value == self.before for override in entry.overrides):
            raise RefusedCallError(
                f"{where}: the plan overrides an attribute with the size of the vocabulary; {BEFORE}"
            )
        return replace(
            entry,
            inputs=tuple(self.step(where, step) for step in entry.inputs),
            outputs=tuple(self.step(where, step) for step in entry.outputs),
        )


def resized_plan(plan: Plan, shapes: Shapes, owners: Collection[str], num_parameters: int) -> Plan:
    """Return the plan of a model in which some parameters got another number of rows.

    Args:
        shapes: the new global shapes of these parameters and buffers, by FQN in the plan.
        owners: the modules of these parameters, under each of their names.
        num_parameters: of the model, global.
    """
    entries = parameter_plans(plan)
    sizes = {
        (before, after)
        for name, shape in shapes.items()
        for before, after in zip(global_shape(entries[name]), shape, strict=True)
        if before != after
    }
    if len(sizes) != 1:
        raise RefusedCallError(
            f"the parameters of the vocabulary would change in several sizes: {sorted(sizes)}; {BEFORE}"
        )
    resizing = _Resizing(*sizes.pop())
    if resizing.after < plan.tp:
        raise OptionError(f"{plan.tp} ranks cannot share a vocabulary of {resizing.after} tokens; give more")

    def parameter(entry: ParameterPlan) -> ParameterPlan:
        name = entry.names[0]
        if name not in shapes:
            return entry
        if entry.packing is not None or entry.partial:
            raise RefusedCallError(
                f"{name}: it is packed, or a term of a sum, and cannot be resized on ranks"
            )
        pairs = zip(entry.dims, shapes[name], strict=True)
        return replace(entry, dims=tuple(d if size(d) == n else resizing.dim(name, d) for d, n in pairs))

    changed = {*owners, *([] if plan.logits is None else [plan.logits.module])}

    def module(entry: ModulePlan) -> ModulePlan:
        if entry.names[0] in changed:
            return resizing.module(entry)
        for step in (*entry.inputs, *entry.outputs):
            if size(getattr(step, "layout", Leaf(0))) == resizing.before:
                raise RefusedCallError(
                    f"{entry.names[0]}: a step of the plan has as many positions as there are tokens, and "
                    f"the module has no part of the vocabulary; {BEFORE}"
                )
        return entry

    def modules(of_form: tuple[ModulePlan, ...]) -> tuple[ModulePlan, ...]:
        return _each("modules", of_form, module)

    training = plan.training
    if training is not None and training.sequence is not None:
        sequence = replace(training.sequence, modules=modules(training.sequence.modules))
        training = replace(training, sequence=sequence)
    return replace(
        plan,
        model=replace(plan.model, num_parameters=num_parameters),
        parameters=_each("parameters", plan.parameters, parameter),
        modules=modules(plan.modules),
        training=training,
    )


def _each(path: str, entries: tuple[_Entry, ...], change: Callable[[_Entry], _Entry]) -> tuple[_Entry, ...]:
    """Change the entries of single names; names whose entries stay equal share one."""
    grouped: dict[_Entry, list[str]] = {}
    for name, entry in by_name(path, entries).items():
        single = change(replace(entry, names=(name,)))
        grouped.setdefault(replace(single, names=entry.names), []).append(name)
    return tuple(replace(entry, names=tuple(compress(names))) for entry, names in grouped.items())
