"""Which modules and parameters a stage of a pipeline holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from ..errors import PlanError
from .names import expand_all
from .pipeline_stages import StagedModule
from .plan import ParameterPlan, Plan, parameter_plans

T = TypeVar("T")


def num_stages(plan: Plan) -> int:
    """How many stages a plan has; 1 for a plan without any."""
    return 1 if plan.stages is None else plan.stages.count


def staged_modules(plan: Plan) -> dict[str, tuple[StagedModule, int]]:
    """By FQN the entry of each module that has stages, and its position among the names of the entry.

    Raises:
        PlanError: two entries claim one name, or the patterns stand for too many names.
    """
    found: dict[str, tuple[StagedModule, int]] = {}
    for entry in plan.stages.modules if plan.stages is not None else ():
        for position, name in enumerate(expand_all(entry.names)):
            if name in found:
                raise PlanError(f"stages.modules: {name!r} is claimed twice")
            found[name] = entry, position
    return found


def absent_modules(plan: Plan, stage: int) -> frozenset[str]:
    """FQNs of the modules that have stand-ins on a stage."""
    return frozenset(name for name, (entry, _) in staged_modules(plan).items() if stage not in entry.stages)


def held_names(plan: Plan, stage: int, names: Collection[str] | None = None) -> dict[str, str]:
    """The parameters that a stage holds: the first of the names of each -> the name by which it is in the
    stage's model, which is another one where the module of the first name is on another stage.

    Args:
        plan: with stages, or without any.
        stage: its number.
        names: first names of parameters and persistent buffers; by default all of the plan.
    """
    names = parameter_plans(plan).keys() if names is None else names
    absent = absent_modules(plan, stage)
    others: dict[str, list[str]] = {}
    for alias, name in plan.tied:
        others.setdefault(name, []).append(alias)
    found: dict[str, str] = {}
    for name in names:
        held = next((one for one in (name, *others.get(name, ())) if not is_inside(one, absent)), None)
        if held is not None:
            found[name] = held
    return found


def held_by(plan: Plan, stage: int, tensors: Mapping[str, T]) -> dict[str, T]:
    """What a stage holds, by the names in its model.

    Args:
        plan: with stages.
        stage: its number.
        tensors: of all stages, by the first of their names.
    """
    held = held_names(plan, stage, tensors.keys())
    return {name: tensors[first] for first, name in held.items()}


def held_before(plan: Plan, stage: int) -> dict[str, str]:
    """Of the parameters that a stage holds and an earlier one too, the first name -> that in its model."""
    earlier = {name for number in range(stage) for name in held_names(plan, number)}
    return {first: held for first, held in held_names(plan, stage).items() if first in earlier}


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether a parameter or module is in one of these modules, or is one."""
    while name:
        if name in modules:
            return True
        name = name.rpartition(".")[0]
    return False


def own_parameters(plan: Plan, stage: int) -> tuple[ParameterPlan, ...]:
    """The parameters that a stage holds, by their names in its model, one entry for each."""
    entries = parameter_plans(plan)
    held = held_names(plan, stage)
    return tuple(replace(entries[first], names=(name,)) for first, name in held.items())
