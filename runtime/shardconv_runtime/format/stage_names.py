"""Finds the modules and parameters that a stage of a pipeline holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from ..errors import PlanError
from .names import expand_all
from .pipeline_stages import StagedModule
from .plan import ParameterPlan, Plan, parameter_plans

T = TypeVar("T")

Stages = int | Collection[int]
"""The number of a stage, or the numbers of the stages of one process."""


def num_stages(plan: Plan) -> int:
    """Return the number of stages of a plan; 1 if it has none."""
    return 1 if plan.stages is None else plan.stages.count


def staged_modules(plan: Plan) -> dict[str, tuple[StagedModule, int]]:
    """Return the entry of each module that has stages by FQN, with its position among the entry's names."""
    entries: dict[str, tuple[StagedModule, int]] = {}
    for entry in plan.stages.modules if plan.stages is not None else ():
        for position, name in enumerate(expand_all(entry.names)):
            if name in entries:
                raise PlanError(f"stages.modules: {name!r} is claimed twice")
            entries[name] = entry, position
    return entries


def stages_of(plan: Plan, place: int, num_places: int) -> tuple[int, ...]:
    """Return the stages of a process, ascending: consecutive stages belong to consecutive processes."""
    return tuple(range(place, num_stages(plan), num_places))


def absent_modules(plan: Plan, stages: Stages) -> frozenset[str]:
    """Return the FQNs of the modules that none of these stages runs."""
    present = {stages} if isinstance(stages, int) else set(stages)
    return frozenset(name for name, (e, _) in staged_modules(plan).items() if present.isdisjoint(e.stages))


def held_names(plan: Plan, stages: Stages, names: Collection[str] | None = None) -> dict[str, str]:
    """Return the parameters that a stage or process holds: first name -> name in its model."""
    names = parameter_plans(plan).keys() if names is None else names
    absent = absent_modules(plan, stages)
    aliases: dict[str, list[str]] = {}
    for alias, name in plan.tied:
        aliases.setdefault(name, []).append(alias)
    names_in_model: dict[str, str] = {}
    for name in names:
        present_name = next(
            (one for one in (name, *aliases.get(name, ())) if not is_inside(one, absent)), None
        )
        if present_name is not None:
            names_in_model[name] = present_name
    return names_in_model


def held_by(plan: Plan, stages: Stages, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the values of a stage or process, by the names in its model."""
    names_in_model = held_names(plan, stages, tensors.keys())
    return {name: tensors[first] for first, name in names_in_model.items()}


def held_before(plan: Plan, place: int, num_places: int) -> dict[str, str]:
    """Return the first names of parameters that an earlier process holds too -> their names in its model."""
    stages_here, *earlier_stages = (stages_of(plan, p, num_places) for p in (place, *range(place)))
    earlier = {name for stages in earlier_stages for name in held_names(plan, stages)}
    return {
        first: name_in_model
        for first, name_in_model in held_names(plan, stages_here).items()
        if first in earlier
    }


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Return whether a parameter or module is one of these modules, or inside of one."""
    while name:
        if name in modules:
            return True
        name = name.rpartition(".")[0]
    return False


def own_parameters(plan: Plan, stages: Stages) -> tuple[ParameterPlan, ...]:
    """Return the parameters of a stage or process by the names in its model, one entry for each."""
    entries = parameter_plans(plan)
    names_in_model = held_names(plan, stages)
    return tuple(replace(entries[first], names=(name,)) for first, name in names_in_model.items())
