"""Models that keep their shard of the logits."""

from __future__ import annotations

from dataclasses import replace

from ..errors import PlanError
from ..format.plan import AllGatherStep, LogitsInfo, ModulePlan

WHY_NO_LABELS = (
    "that was loaded with gather_logits=False: its loss would be that of a shard of the vocabulary; load "
    "with gather_logits=True"
)


def without_logits_gather(modules: dict[str, ModulePlan], logits: LogitsInfo | None) -> dict[str, ModulePlan]:
    """The modules without the gather of the logits.

    Raises:
        PlanError: the plan gathers none.
    """
    entry = modules.get(logits.module) if logits else None
    if logits is None or entry is None:
        raise PlanError("gather_logits=False: the plan does not shard the logits")
    outputs = tuple(
        step for step in entry.outputs if not (step.slot == logits.slot and isinstance(step, AllGatherStep))
    )
    if len(outputs) == len(entry.outputs):
        raise PlanError(f"{logits.module}: the plan gathers no logits at slot {logits.slot!r}")
    return {**modules, logits.module: replace(entry, outputs=outputs, gather_output=False)}
