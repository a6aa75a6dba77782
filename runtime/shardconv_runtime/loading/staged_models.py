"""Loading models with pipeline stages: the place of a process, and the model of its stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing

import torch
from torch import Tensor, nn

from ..comm.mesh import Launch
from ..comm.stage_processes import StageProcesses, stage_processes
from ..errors import PlanError
from ..format.plan import Plan
from ..format.plan_json import of_sequence, of_stage
from ..format.slices import Rows
from ..format.staged_names import absent_modules, held_names, num_stages
from ..parallel.layers import with_local_logits
from ..parallel.stage_model import StageModel, argument_names, keep_stage
from ..training.stage_training import prepare_stage

Tensors = Generator[tuple[str, Tensor]]
"""Names and local tensors."""


def require_several(plan: Plan, per_process: int, *, training: bool) -> None:
    """Check that each process can have ``per_process`` stages.

    Raises:
        PlanError: it cannot.
    """
    about = f"stages_per_process={per_process}"
    count = num_stages(plan)
    if plan.stages is None:
        raise PlanError(f"{about}: the model has no stages; convert it with --pp, or leave that out")
    if not training:
        raise PlanError(
            f"{about} is for training, where microbatches go round the processes; for inference each process "
            "has one stage: leave it out, or pass training=True"
        )
    if per_process < 1 or count % per_process:
        fitting = [n for n in range(1, count // 2 + 1) if count % n == 0]
        raise PlanError(f"{about} does not divide the {count} stages of the model; choose among {fitting}")
    if per_process == count:
        raise PlanError(f"{about}: one process would have all stages; convert the model without --pp")


def place_of(plan: Plan, start: Launch, per_process: int) -> StageProcesses:
    """Return the place of this process in the pipeline; every process calls it.

    Raises:
        PlanError: the directory that was read is for another stage.
        LaunchError: the processes cannot communicate.
    """
    assert plan.stages is not None
    place = stage_processes(start, num_stages(plan), plan.tp, per_process)
    first = place.link.place
    if plan.stages.own not in (None, first):
        raise PlanError(
            f"the directory holds stage {plan.stages.own}, and this rank is on stage {first}; name "
            "the directory that holds all stages"
        )
    return place


class StagedBuilder:
    """Builds the model of a process that has one or several stages of a pipeline.

    Args:
        plan: the plan of all stages, with adapters.
        place: the place of this process.
        model: the unsharded model on meta, before it is parallelized.
    """

    def __init__(self, plan: Plan, place: StageProcesses, model: nn.Module) -> None:
        self._plan = plan
        self._place = place
        self._names = argument_names(model, plan)
        self.stages = place.link.stages

    @property
    def absent(self) -> Sequence[Collection[str]]:
        """Return the FQNs of modules that are on other stages, for each stage of the process."""
        return [absent_modules(self._plan, stage) for stage in self.stages]

    def own(self, plan: Plan) -> Plan:
        """Return the part of a plan that is about the stages of this process."""
        return of_stage(plan, self.stages)

    def keep_own(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        *,
        training: bool,
        sequence_parallel: bool,
        local_logits: bool,
    ) -> StageModel:
        """Replace modules of other stages by placeholders, in place.

        Args:
            model: the model of one rank, as ``parallelize`` makes it.
            dtype: dtype in which modules compute; None for the stored dtype of the parameters.
            training: the model is to be trained.
            sequence_parallel: activations are sharded over the sequence.
            local_logits: each rank keeps its shard of the logits.
        """
        plan, link, ranks = self._plan, self._place.link, self._place.ranks
        if sequence_parallel:
            plan = of_sequence(plan)
        if local_logits:
            plan = with_local_logits(plan)
        dtype = dtype or getattr(torch, plan.model.dtype)
        if training:
            prepare_stage(model, link)
        return keep_stage(model, plan, link, ranks.rank, ranks.device, dtype, self._names)

    def tensors(self, plan: Plan, stored: Sequence[Callable[[Rows], Tensors]], rows: Rows) -> Tensors:
        """Yield each tensor of the stages once, with the name that it has in the process's model.

        Args:
            plan: the plan of all stages, as they are stored.
            stored: a function for each stage that yields its tensors, or rows of them, by the names in its
                directory.
            rows: name in the model -> the rows of the tensor to yield; see ``format.slices.Rows``.
        """
        own = held_names(plan, self.stages)
        taken: set[str] = set()
        for stage, read in zip(self.stages, stored, strict=True):
            names = {name: own[first] for first, name in held_names(plan, stage).items()}
            wanted = {name: rows[held] for name, held in names.items() if held in rows}
            with closing(read(wanted)) as tensors:
                for name, tensor in tensors:
                    held = names.get(name, name)  # a packed parameter is stored as several tensors
                    if held not in taken:
                        taken.add(held)
                        yield held, tensor
