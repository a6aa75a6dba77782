"""The plan of one stage of a pipeline."""

from __future__ import annotations

from dataclasses import replace

from .fused_groups import fused_groups
from .plan import FusedPlan, Plan
from .staged_names import Stages, absent_modules, held_names, is_inside, own_parameters


def of_stage(plan: Plan, stages: Stages) -> Plan:
    """Return the plan of one stage, or of one process, by the names in its model, with its fused groups.

    The modules are those of all stages.
    """
    if plan.stages is None:
        return plan
    absent = absent_modules(plan, stages)
    held = held_names(plan, stages)
    tied = [
        (alias, held[name])
        for alias, name in plan.tied
        if name in held and alias != held[name] and not is_inside(alias, absent)
    ]
    groups = [group for group in fused_groups(plan) if not any(is_inside(fqn, absent) for fqn in group)]
    fused = tuple(FusedPlan(tuple((fqn,) for fqn in group)) for group in groups)
    return replace(plan, parameters=own_parameters(plan, stages), tied=tuple(tied), fused=fused)
