"""Models with pipeline stages: what of ``load`` does not know them, and the model of one stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from ..comm.mesh import Launch
from ..comm.stage_processes import StageProcesses, stage_processes
from ..errors import PlanError
from ..format.plan import Plan
from ..format.staged_names import held_names, num_stages
from ..parallel.stage_model import keep_stage

if TYPE_CHECKING:
    from ..tensors.lazy_tensor import LazyTensor


def require_known(plan: Plan, unknown: Mapping[str, bool], *, dequantize: bool) -> None:
    """Refuse what a model with stages cannot be loaded with.

    Args:
        plan: of the model.
        unknown: arguments that stages do not know, and whether each was given.
        dequantize: packed parameters are multiplied out.

    Raises:
        PlanError: such an argument was given, or the model is packed.
    """
    for argument in (name for name, is_given in unknown.items() if is_given):
        raise PlanError(f"{argument} does not know stages yet; leave it out, or plan the model without --pp")
    if not dequantize and any(entry.packing is not None for entry in plan.parameters):
        raise PlanError("packed parameters are not computed with on stages yet; pass dequantize=True")


def place_of(plan: Plan, start: Launch) -> StageProcesses:
    """The place of this process; every process calls it.

    Raises:
        LaunchError: the processes cannot communicate.
    """
    return stage_processes(start, num_stages(plan), plan.tp)


def keep_own(model: nn.Module, plan: Plan, place: StageProcesses) -> nn.Module:
    """Put stand-ins in the place of other stages' modules, in place.

    Args:
        model: of one rank, as ``parallelize`` makes it.
        plan: of all stages.
        place: of this process.
    """
    return keep_stage(model, plan, place.link, place.ranks.rank, place.ranks.device)


def own_weights(plan: Plan, weights: Mapping[str, LazyTensor], stage: int) -> dict[str, LazyTensor]:
    """The global weights of one stage, by their names in its model.

    Args:
        plan: of all stages.
        weights: of all stages.
        stage: its number.
    """
    return {name: weights[first] for first, name in held_names(plan, stage, weights.keys()).items()}
