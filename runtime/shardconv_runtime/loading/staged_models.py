"""Models with pipeline stages: what of ``load`` does not know them, and the model of one stage."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..comm.mesh import Launch
from ..comm.stage_processes import StageProcesses, stage_processes
from ..errors import PlanError
from ..format.plan import Plan
from ..format.staged_names import num_stages
from ..parallel.stage_model import ArgumentNames, StageModel, keep_stage


def require_known(unknown: Mapping[str, bool]) -> None:
    """Refuse what a model with stages cannot be loaded with.

    Args:
        unknown: arguments that stages do not know, and whether each was given.

    Raises:
        PlanError: such an argument was given.
    """
    for argument in (name for name, is_given in unknown.items() if is_given):
        raise PlanError(f"{argument} does not know stages yet; leave it out, or convert without --pp")


def place_of(plan: Plan, start: Launch) -> StageProcesses:
    """The place of this process; every process calls it.

    Raises:
        PlanError: the directory that was read is that of another stage.
        LaunchError: the processes cannot communicate.
    """
    assert plan.stages is not None
    place = stage_processes(start, num_stages(plan), plan.tp)
    if plan.stages.own not in (None, place.number):
        raise PlanError(
            f"the directory holds stage {plan.stages.own}, and this rank is on stage {place.number}; name "
            "the directory that holds those of all stages"
        )
    return place


def keep_own(
    model: nn.Module,
    plan: Plan,
    place: StageProcesses,
    dtype: torch.dtype | None,
    names: ArgumentNames,
    *,
    training: bool,
    sequence_parallel: bool,
) -> StageModel:
    """Put stand-ins in the place of other stages' modules, in place.

    Args:
        model: of one rank, as ``parallelize`` makes it.
        plan: of all stages.
        place: of this process.
        dtype: that modules compute in; None: that of the parameters as they are stored.
        names: of the unsharded model.
        training: the model is to be trained.
        sequence_parallel: its activations are sharded over the sequence.
    """
    if sequence_parallel:
        from ..format.plan_forms import of_sequence

        plan = of_sequence(plan)
    dtype = dtype or getattr(torch, plan.model.dtype)
    if training:
        from ..training.stage_training import prepare_stage

        prepare_stage(model, place.link)
    return keep_stage(model, plan, place.link, place.ranks.rank, place.ranks.device, dtype, names)
