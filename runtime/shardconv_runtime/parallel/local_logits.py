"""Models that keep their shard of the logits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..errors import PlanError
from ..format.names import expand_all
from ..format.pipeline_stages import StagedModule, StandInDim, StandInItem
from ..format.plan import AllGatherStep, LogitsInfo, ModulePlan, Plan, module_plans
from ..format.staged_names import staged_modules

WHY_NO_LABELS = (
    "that was loaded with gather_logits=False: its loss would be that of a shard of the vocabulary; load "
    "with gather_logits=True"
)


def without_logits_gather(
    modules: dict[str, ModulePlan], logits: LogitsInfo | None, heads: Collection[str] = ()
) -> dict[str, ModulePlan]:
    """The modules without the gather of the logits.

    Args:
        modules: of a plan.
        logits: of the plan.
        heads: further modules that compute the logits in place of the plan's, in other calls.

    Raises:
        PlanError: the plan gathers none.
    """
    module, gather = _gather(modules, logits)
    found = dict(modules)
    for name in {module, *heads}:
        outputs = tuple(step for step in modules[name].outputs if step != gather)
        found[name] = replace(modules[name], outputs=outputs, gather_output=False)
    return found


def _gather(modules: Mapping[str, ModulePlan], logits: LogitsInfo | None) -> tuple[str, AllGatherStep]:
    """FQN of the module that computes the logits, and the step that gathers them."""
    entry = modules.get(logits.module) if logits else None
    if logits is None or entry is None:
        raise PlanError("gather_logits=False: the plan does not shard the logits")
    for step in entry.outputs:
        if step.slot == logits.slot and isinstance(step, AllGatherStep):
            return logits.module, step
    raise PlanError(f"{logits.module}: the plan gathers no logits at slot {logits.slot!r}")


def with_local_logits(plan: Plan) -> Plan:
    """The plan of stages whose last one keeps a rank's shard of the logits, and so do stand-ins of the head.

    Args:
        plan: with stages, in the form that is to run.

    Raises:
        PlanError: the plan does not say what stands in for the head alone.
    """
    assert plan.stages is not None
    gather = _gather(module_plans(plan), plan.logits)
    module, slot = gather[0], gather[1].slot
    found = staged_modules(plan).get(module)
    if found is None or found[0].returns != "tensor" or slot != "output":
        raise PlanError(
            f"gather_logits=False: with stages, the module that computes the logits ({module}) should not be "
            "a part of another one that has parameters; leave it out, or convert without --pp"
        )
    entry, step = found[0], gather[1]
    tensor = entry.items[0].tensor
    assert tensor is not None, "it is the only item"
    dims = list(tensor.dims)
    dims[step.dim] = StandInDim(size=step.layout)
    own = replace(entry, names=(module,), items=(StandInItem(replace(tensor, dims=tuple(dims))),))
    others = [replace(each, names=_without(each, module)) for each in plan.stages.modules]
    modules = (*(each for each in others if each.names), own)
    return replace(plan, stages=replace(plan.stages, modules=modules))


def _without(entry: StagedModule, name: str) -> tuple[str, ...]:
    names = expand_all(entry.names)
    return tuple(other for other in names if other != name) if name in names else entry.names
