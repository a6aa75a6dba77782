"""Loading models with pipeline stages: the place of a process, and the model of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from ..comm.mesh import Launch
from ..errors import OptionError, PlanError
from ..format.plan import Plan
from ..format.plan_json import of_sequence, of_stage
from ..format.slices import Rows
from ..format.stage_names import held_names, num_stages
from ..parallel.layers import with_local_logits
from ..pp.stage_model import argument_names, keep_stage
from ..pp.stage_processes import StageProcesses, stage_processes
from ..pp.stage_training import evaluate_in_passes, prepare_stage
from .checked_source import LoadOptions
from .transform import RankModel, ReadTensors, Tensors, Transform


def require_several(plan: Plan, per_process: int, *, training: bool) -> None:
    """Check that each process can have ``per_process`` stages."""
    about = f"stages_per_process={per_process}"
    count = num_stages(plan)
    if plan.stages is None:
        raise OptionError(f"{about}: the model has no stages; convert it with --pp, or leave that out")
    if not training:
        raise OptionError(
            f"{about} is for training, where microbatches go round the processes; for inference each process "
            "has one stage: leave it out, or pass training=True"
        )
    if per_process < 1 or count % per_process:
        fitting = [n for n in range(1, count // 2 + 1) if count % n == 0]
        raise OptionError(f"{about} does not divide the {count} stages of the model; choose among {fitting}")
    if per_process == count:
        raise PlanError(f"{about}: one process would have all stages; convert the model without --pp")


def place_of(plan: Plan, start: Launch, per_process: int) -> StageProcesses:
    """Return the place of this process in the pipeline; every process calls it."""
    assert plan.stages is not None
    place = stage_processes(start, num_stages(plan), plan.tp, per_process)
    first = place.link.place
    if plan.stages.own not in (None, first):
        raise PlanError(
            f"the directory holds stage {plan.stages.own}, and this rank is on stage {first}; name "
            "the directory that holds all stages"
        )
    return place


class OwnStages(Transform):
    """The plan of the stages of this process, before modules change."""

    def shape(self, rank: RankModel) -> RankModel:
        """Note which tensors the process holds, and the arguments of modules that may be replaced."""
        if rank.place is None:
            return rank
        held_plan = of_stage(rank.plan, rank.place.link.stages)
        return replace(rank, held_plan=held_plan, argument_names=argument_names(rank.model, rank.plan))


@dataclass(frozen=True)
class Placeholders(Transform):
    """Placeholders in the place of the modules of other stages."""

    options: LoadOptions

    def check(self, plan: Plan) -> None:
        """Check that the options know stages."""
        options = self.options
        if plan.stages is not None:
            for argument in (name for name, is_given in options.unknown_to_stages.items() if is_given):
                raise OptionError(
                    f"{argument} does not know stages yet; leave it out, or convert without --pp"
                )
        if options.stages_per_process != 1:
            require_several(plan, options.stages_per_process, training=options.training is not None)

    def shape(self, rank: RankModel) -> RankModel:
        """Replace modules of other stages."""
        place, plan, options = rank.place, rank.plan, self.options
        if place is None:
            return rank
        if options.sequence_parallel:
            plan = of_sequence(plan)
        if options.gather_logits is False:
            plan = with_local_logits(plan)
        dtype = options.computed_dtype or getattr(torch, plan.model.dtype)
        if options.training:
            prepare_stage(rank.model, place.link)
        assert rank.argument_names is not None, "`OwnStages` comes before"
        number, device = place.ranks.rank, place.ranks.device
        stage = keep_stage(rank.model, plan, place.link, number, device, dtype, rank.argument_names)
        return replace(rank, stage=stage)

    def finish(self, rank: RankModel) -> None:
        """Have a call run all stages of the process."""
        if rank.stage is not None and len(rank.stage.link.stages) > 1:
            evaluate_in_passes(rank.model, rank.stage)


def tensors_of_stages(
    plan: Plan, stages: Sequence[int], read_each: Sequence[ReadTensors], rows: Rows
) -> Tensors:
    """Yield each tensor of the stages of a process once, with the name that it has in the process's model."""
    first_names = held_names(plan, stages)
    taken: set[str] = set()
    for stage, read in zip(stages, read_each, strict=True):
        names = {name: first_names[first] for first, name in held_names(plan, stage).items()}
        rows_of_stage = {name: rows[in_model] for name, in_model in names.items() if in_model in rows}
        with closing(read(rows_of_stage)) as tensors:
            for name, tensor in tensors:
                in_model = names.get(name, name)  # a packed parameter is stored as several tensors
                if in_model not in taken:
                    taken.add(in_model)
                    yield in_model, tensor
