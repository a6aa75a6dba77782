"""The model of this rank, built from the model that the ranks agreed to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ..adapters.adapter_set import AdapterSet
from ..adapters.attaching import Adapter, attach
from ..comm import agreement
from ..comm.collectives import AllReduce, Communicator, ProcessCommunicator
from ..comm.mesh import Launch, can_capture, connect
from ..format.fused_groups import adjacent_tensors
from ..format.plan import Plan
from ..format.plan_json import of_sequence, of_stage
from ..format.slices import Rows
from ..format.stage_names import held_by
from ..inference.compiling import compile_model, compile_stage
from ..loaded import Loaded, remember, unwrapped
from ..parallel.boundary import settle_hooks
from ..pp.stage_processes import StageProcesses
from ..storage.reading import with_rows
from ..training.initial_parts import attach_initializing
from ..training.prepare import backward_axes
from ..training.replica_comparison import compare_replicas
from . import rank_files
from .by_plan import local_tensors
from .call_guards import guard
from .checked_source import CheckedSource, LoadOptions, generation_config_of, stays_packed, unsharded
from .in_memory import tensors_in_memory
from .model_transforms import Adapters, Dtypes, Fusing, Generation, TensorParallel
from .packed_models import PackedParameters
from .resized_vocabulary import attach_resizing
from .stage_loading import OwnStages, Placeholders, place_of, tensors_of_stages
from .transform import RankModel, ReadTensors, Stored, Tensors, Transform


def transforms(
    checked: CheckedSource, options: LoadOptions, start: Launch | None = None, *, reads_all: bool = False
) -> Sequence[Transform]:
    """Return everything that loading does to a model, in order.

    Args:
        start: all ranks; None before they have met, when transforms only check.
        reads_all: the tensors are given under their last names, and not read from files.
    """
    adapters, packed = checked.adapters, stays_packed(checked.plan, options)
    todo: list[Transform] = []
    if adapters is not None:
        todo.append(Adapters(adapters, options.training is not None, reads_all))
    if not reads_all:
        todo.append(Dtypes(options.dtype is not None, checked.plan))
    todo += [
        OwnStages(),
        Fusing(options),
        PackedParameters(checked.directory, options.dtype, packed),
        TensorParallel(options, packed, adapters is not None),
        Placeholders(options),
    ]
    if options.data_parallel is not None and not reads_all:
        todo.append(options.data_parallel)
    if start is not None:
        todo.append(Generation(generation_config_of(checked), start, options.gather_logits is not False))
    return todo


@dataclass(frozen=True)
class ModelBuilder:
    """Builds the model of a rank, and later the same model with other adapters."""

    checked: CheckedSource
    options: LoadOptions
    start: Launch
    all_ranks: Launch
    """All processes that build the model together."""

    def with_adapters(self, adapters: AdapterSet | None) -> ModelBuilder:
        """Return a builder of the same model with other adapters."""
        return replace(self, checked=replace(self.checked, adapters=adapters))

    def unsharded_model(self) -> nn.Module:
        """Return the model of global shapes on meta, without quantization and without adapters."""
        return unsharded(self.checked, self.options)[1]

    def unsharded_wrapper(self) -> nn.Module:
        """Return a ``peft.PeftModel`` of global shapes on meta, with new adapters of the same configs."""
        assert self.checked.adapters is not None, "it has some"
        configs = {name: each.adapter.config for name, each in self.checked.adapters.adapters.items()}
        new = {name: Adapter(config) for name, config in configs.items()}
        return attach(self.unsharded_model(), new, trainable=True, initialized=False).wrapper

    def model(self, stored: Stored | None = None) -> nn.Module:
        """Build the model. Every process calls it, and all raise if one has an error.

        Args:
            stored: tensors to fill it with; by default they are read.
        """
        start, checked, options = self.start, self.checked, self.options
        place: StageProcesses | None = None
        if checked.plan.stages is not None:
            find = partial(place_of, checked.plan, start, options.stages_per_process)
            place = agreement.together(self.all_ranks, find, agreement.CONNECT_TIMEOUT_S)
        ranks = start if place is None else place.ranks
        make_groups = partial(_connect, checked.full_plan, options, ranks, options.communication.all_reduce)
        comm = agreement.together(self.all_ranks, make_groups, agreement.CONNECT_TIMEOUT_S)
        timeout = agreement.READ_TIMEOUT_S if checked.has_shards else agreement.DOWNLOAD_TIMEOUT_S
        built: nn.Module = agreement.together(
            self.all_ranks, partial(self._built, comm, stored, place), timeout
        )
        model = unwrapped(built)
        if options.compiling is not None:
            if place is None:
                records = can_capture(start)
                compile_model(model, cuda_graphs=records, same_bits=start.world_size > 1)
            else:
                compile_stage(model, start, place.link, same_bits=place.ranks.world_size > 1)
        if start.world_size > 1 or options.mesh is not None or stays_packed(checked.plan, options):
            guard(
                model,
                start,
                ranks,
                comm,
                of_sequence(checked.full_plan) if options.sequence_parallel else checked.full_plan,
                training=options.training is not None,
                check_inputs=options.communication.check_inputs,
            )
        if options.data_parallel is not None:
            compare_replicas(model, self.all_ranks)
        settle_hooks(model)
        return built

    def _built(self, comm: Communicator, stored: Stored | None, place: StageProcesses | None) -> nn.Module:
        """Build the model, or the ``PeftModel`` around it, without a message to other ranks."""
        checked, options, plan = self.checked, self.options, self.checked.full_plan
        start = self.start if place is None else place.ranks
        config, model = unsharded(checked, options)
        rank = RankModel(model, config, plan, plan, start, comm, place)

        steps = transforms(checked, options, self.start, reads_all=stored is not None)
        for step in steps:
            rank = step.shape(rank)
        if options.verify:
            for part in (checked, *checked.more):
                rank_files.verify_checksums(part.directory, part.manifest, start.rank, part.objects)
        read: ReadTensors
        if stored is None:
            read = self._source(rank)
        else:
            tensors, attached = stored, rank.attached
            read = lambda rows: tensors(attached)  # noqa: E731  (an expression is what mypy can type here)
        for step in steps:
            read = step.fill(rank, read)
        rank_files.fill(rank, read({}))
        for step in steps:
            step.finish(rank)
        if checked.in_memory is None or not checked.in_memory.is_meta:
            rank_files.require_filled(model)
            rank_files.mark_loaded(model)

        names = None
        if rank.attached is not None:
            names = replace(rank.attached, wrapper=nn.Module(), tensors={})
        about = checked.directory.absolute(), checked.manifest, plan, self.start
        remember(model, Loaded(*about, rank.packed is not None, self, names, rank.stage))
        attach_resizing(model)
        attach_initializing(model)
        return (model if rank.attached is None else rank.attached.wrapper).eval()

    def _source(self, rank: RankModel) -> ReadTensors:
        """Return how this process reads its tensors, by their names in its model without adapters."""
        checked, plan = self.checked, self.checked.plan
        stages = () if rank.place is None else rank.place.link.stages
        if stages and checked.checkpoint:
            checked = replace(checked, checkpoint=held_by(plan, stages, checked.checkpoint))
        # The files have the names of the model without adapters, which has other groups of fused layers.
        stored_plan = rank.held_plan
        if checked.adapters is not None:
            stored_plan = replace(of_stage(plan, stages) if stages else plan, fused=())
        parts = [partial(_stored, part, stored_plan, rank.start) for part in (checked, *checked.more)]
        return parts[0] if len(parts) == 1 else partial(tensors_of_stages, plan, stages, parts)


def _connect(
    plan: Plan, options: LoadOptions, start: Launch, all_reduce: AllReduce | str | None
) -> ProcessCommunicator:
    """Make the process groups of all collectives that the wanted form of the model issues."""
    if isinstance(all_reduce, str):
        from ..comm.symmetric import connect_by_name  # registers an operator, which takes 20 ms

        return connect_by_name(all_reduce, start, lambda function: _connect(plan, options, start, function))
    if not options.form:
        return connect(plan, start, all_reduce)
    used = of_sequence(plan) if options.sequence_parallel else plan
    return connect(used, start, all_reduce, backward_axes(used) if options.training else ())


def _stored(checked: CheckedSource, plan: Plan, start: Launch, rows: Rows) -> Tensors:
    """Yield local tensors of this rank, from its own files, a checkpoint, or a model in memory."""
    if checked.checkpoint is not None:
        weights, planned = checked.checkpoint, not checked.in_wanted_dtypes
        return local_tensors(plan, weights, start.rank, start.device, rows, in_planned_dtypes=planned)
    if checked.in_memory is not None:
        return tensors_in_memory(plan, checked.in_memory, start.rank, start.device, rows)
    assert checked.files is not None
    adjacent = adjacent_tensors(plan) if plan.fused else ()
    shards = with_rows(checked.files.shards, rows) if rows else checked.files.shards
    return rank_files.tensors(shards, start.device, adjacent)
