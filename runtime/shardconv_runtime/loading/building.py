"""The model of this rank, built from the model that the ranks agreed to load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..adapters.adapter_set import AdapterSet
from ..adapters.attaching import Adapter, Attached, attach
from ..comm import agreement
from ..comm.collectives import AllReduce, Communicator, ProcessCommunicator
from ..comm.mesh import Launch, can_capture, connect
from ..errors import PlanError
from ..files.model_config import read_generation_config
from ..format.header import ShardFile
from ..format.plan import Plan
from ..format.plan_json import of_sequence, of_stage
from ..format.slices import Rows
from ..format.stage_names import absent_modules, held_by, held_names, num_stages
from ..format.stored_layout import adjacent_tensors
from ..inference.compiling import compile_model, compile_stage
from ..inference.generation import prepare_generation
from ..loaded import Loaded, remember, unwrapped
from ..parallel.boundary import settle_hooks
from ..parallel.build import parallelize, stored_tensors
from ..parallel.layers import with_local_logits
from ..pp.stage_model import StageModel, argument_names, keep_stage
from ..pp.stage_processes import StageProcesses, stage_processes
from ..pp.stage_training import evaluate_in_passes, prepare_stage
from ..training.fsdp import compare_replicas
from ..training.prepare import backward_axes, parallelize_for_training
from . import rank_files
from .by_plan import local_tensors
from .call_guards import guard
from .checked_source import CheckedSource, LoadOptions, stays_packed, unsharded
from .packed_models import packed_modules
from .reading import with_rows

# Loading models with pipeline stages: the place of a process, and the model of its stages.


Tensors = Generator[tuple[str, Tensor]]
"""Names and local tensors."""


def require_several(plan: Plan, per_process: int, *, training: bool) -> None:
    """Check that each process can have ``per_process`` stages."""
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


class StagedBuilder:
    """Builds the model of a process that has one or several stages of a pipeline."""

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
            dtype: dtype in which modules compute; None for the stored dtype of the parameters.
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
        """Yield each tensor of the stages once, with the name that it has in the process's model."""
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


Stored = Callable[[Attached | None], Generator[tuple[str, Tensor]]]
"""A function that yields a rank's tensors by their names in the model with the attached adapters."""


@dataclass(frozen=True)
class ModelBuilder:
    """Builds the model of a rank, and later the same model with other adapters."""

    checked: CheckedSource
    wanted: LoadOptions
    start: Launch
    all_ranks: Launch
    """All processes that build the model together."""
    all_reduce: AllReduce | str | None
    check_inputs: bool

    def with_adapters(self, adapters: AdapterSet | None) -> ModelBuilder:
        """Return a builder of the same model with other adapters."""
        return replace(self, checked=replace(self.checked, adapters=adapters))

    def unsharded_wrapper(self) -> nn.Module:
        """Return a ``peft.PeftModel`` of global shapes on meta, with new adapters of the same configs."""
        assert self.checked.adapters is not None, "it has some"
        configs = {name: each.adapter.config for name, each in self.checked.adapters.adapters.items()}
        new = {name: Adapter(config) for name, config in configs.items()}
        _, model = unsharded(self.checked, self.wanted)
        return attach(model, new, trainable=True, initialized=False).wrapper

    def model(self, stored: Stored | None = None) -> nn.Module:
        """Build the model. Every process calls it, and all raise if one has an error."""
        start, checked = self.start, self.checked
        place: StageProcesses | None = None
        if checked.plan.stages is not None:
            find = partial(place_of, checked.plan, start, self.wanted.stages_per_process)
            place = agreement.together(self.all_ranks, find, agreement.CONNECT_TIMEOUT_S)
        ranks = start if place is None else place.ranks
        connect = partial(_connect, checked.full_plan, self.wanted, ranks, self.all_reduce)
        comm = agreement.together(self.all_ranks, connect, agreement.CONNECT_TIMEOUT_S)
        timeout = agreement.READ_TIMEOUT_S if checked.checkpoint is None else agreement.DOWNLOAD_TIMEOUT_S
        built: nn.Module = agreement.together(
            self.all_ranks, partial(self._built, comm, stored, place), timeout
        )
        model = unwrapped(built)
        if self.wanted.compiled:
            if place is None:
                records = can_capture(start)
                compile_model(model, cuda_graphs=records, same_bits=start.world_size > 1)
            else:
                compile_stage(model, start, place.link, same_bits=place.ranks.world_size > 1)
        if start.world_size > 1 or self.wanted.over_mesh or stays_packed(checked.plan, self.wanted):
            training, check_inputs = self.wanted.training, self.check_inputs
            guard(model, start, ranks, comm, training=training, check_inputs=check_inputs)
        if self.wanted.data_parallel is not None:
            compare_replicas(model, self.all_ranks)
        settle_hooks(model)
        return built

    def _built(self, comm: Communicator, given: Stored | None, place: StageProcesses | None) -> nn.Module:
        """Build the model, or the ``PeftModel`` around it, without a message to other ranks."""
        checked, wanted, adapters = self.checked, self.wanted, self.checked.adapters
        start = self.start if place is None else place.ranks
        # The unsharded model, on meta, with its adapters.
        config, model = unsharded(checked, wanted)
        attached = None if adapters is None else adapters.attach(model, trainable=wanted.training)
        # It was built in the wanted dtype, so other dtypes are those that its code keeps.
        dtypes = {} if wanted.dtype is None else {n: t.dtype for n, t in stored_tensors(model)}
        if attached is not None:
            dtypes |= attached.dtypes_of_model(checked.plan, dtypes)
        # Its plan, with adapters: `plan` covers all stages, `held_plan` the stages of this process.
        plan = held_plan = checked.full_plan
        staged: StagedBuilder | None = None
        if place is not None:
            staged = StagedBuilder(plan, place, model)
            held_plan = staged.own(plan)
        fuse = wanted.fuse
        if fuse is None:
            # On a GPU, fused products save kernels: a fifth to a third of a compiled step. On a CPU they
            # save nothing, and splitting their results makes a compiled prefill 7% slower.
            fuse = wanted.compiled and start.device.type != "cpu"
        if not fuse or wanted.form:
            held_plan = replace(held_plan, fused=())
        # The model of this rank, still on meta.
        packed = None
        if stays_packed(plan, wanted):
            dtype = wanted.dtype or getattr(torch, plan.model.dtype)
            apart = () if attached is None else attached.linear_layers(model)
            packed = packed_modules(checked.directory, plan, config, start.device, comm, dtype, apart)
        heads: Sequence[str] = ()
        if attached is not None and plan.logits is not None:
            heads = attached.in_place_of(plan.logits.module)
        built_plan = replace(plan, fused=held_plan.fused)
        if wanted.form:
            parallelize_for_training(
                model,
                built_plan,
                comm,
                wanted.gather_logits,
                packed,
                **wanted.form,
                regather=wanted.regather,
                absent=(frozenset(),) if staged is None else staged.absent,
                heads=heads,
            )
        else:
            parallelize(model, built_plan, comm, wanted.gather_logits, packed, heads)
        full_logits = wanted.gather_logits is not False
        stage: StageModel | None = None
        if staged is not None:
            stage = staged.keep_own(
                model,
                wanted.computed_dtype,
                training=wanted.training,
                sequence_parallel=wanted.sequence_parallel,
                local_logits=not full_logits,
            )
        # Fill it with tensors.
        if wanted.verify:
            for part in (checked, *checked.more):
                rank_files.verify_checksums(part.directory, part.manifest, start.rank)
        if given is not None:
            rank_files.read(model, held_plan, given(attached), start, {}, packed)
        else:
            stored = self._stored(held_plan, staged, attached, start)
            if wanted.data_parallel is not None:
                wanted.data_parallel.read(model, held_plan, stored, start, dtypes)
            else:
                rank_files.read(model, held_plan, stored({}), start, dtypes, packed)
        # Attach `generate` and the record of loading.
        generation_config = read_generation_config(checked.directory, checked.manifest)
        link = None if place is None else place.link
        prepare_generation(model, generation_config, self.start, full_logits, link)
        if stage is not None and len(stage.link.stages) > 1:
            evaluate_in_passes(model, stage)
        names = None if attached is None else replace(attached, wrapper=nn.Module(), tensors={})
        about = checked.directory.absolute(), checked.manifest, plan, self.start
        remember(model, Loaded(*about, packed is not None, self, names, stage))
        return (model if attached is None else attached.wrapper).eval()

    def _stored(
        self, held_plan: Plan, staged: StagedBuilder | None, attached: Attached | None, start: Launch
    ) -> Callable[[Rows], Generator[tuple[str, Tensor]]]:
        """Return a function that yields this process's local tensors, by their names in its model."""
        checked, adapters = self.checked, self.checked.adapters
        plan = checked.plan
        if staged is not None and checked.checkpoint:
            checked = replace(checked, checkpoint=held_by(plan, staged.stages, checked.checkpoint))
        # The files have the names of the model without adapters, which has other groups of fused layers.
        stored_plan = held_plan
        if adapters is not None:
            stored_plan = replace(plan if staged is None else staged.own(plan), fused=())
        parts = [partial(_stored, part, stored_plan, start) for part in (checked, *checked.more)]
        stored = parts[0] if staged is None or len(parts) == 1 else partial(staged.tensors, plan, parts)
        if adapters is None or attached is None:
            return stored
        if staged is not None:
            adapters, attached = adapters.of_stages(staged.stages, attached)
        return partial(adapters.tensors, stored, attached, start)


def _connect(
    plan: Plan, wanted: LoadOptions, start: Launch, all_reduce: AllReduce | str | None
) -> ProcessCommunicator:
    """Make the process groups of all collectives that the wanted form of the model issues."""
    if isinstance(all_reduce, str):
        from ..comm.symmetric import connect_by_name  # registers an operator, which takes 20 ms

        return connect_by_name(all_reduce, start, lambda function: _connect(plan, wanted, start, function))
    if not wanted.form:
        return connect(plan, start, all_reduce)
    used = of_sequence(plan) if wanted.sequence_parallel else plan
    return connect(used, start, all_reduce, backward_axes(used) if wanted.training else ())


def _stored(checked: CheckedSource, plan: Plan, start: Launch, rows: Rows) -> Generator[tuple[str, Tensor]]:
    """Yield local tensors of this rank, from its own files or sliced from an ordinary checkpoint.

    Only the positions in ``rows`` of the first dim are read of the tensors that it names.
    """
    if checked.checkpoint is not None:
        weights, planned = checked.checkpoint, not checked.in_wanted_dtypes
        return local_tensors(plan, weights, start.rank, start.device, rows, in_planned_dtypes=planned)
    assert checked.files is not None
    adjacent: tuple[tuple[str, ...], ...] = ()
    if plan.fused:
        adjacent = adjacent_tensors(plan)
    shards: Sequence[ShardFile] = checked.files.shards
    if rows:
        shards = with_rows(shards, rows)
    return rank_files.tensors(shards, start.device, adjacent)
