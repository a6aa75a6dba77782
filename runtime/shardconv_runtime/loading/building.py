"""The model of this rank, built from the model that the ranks agreed to load."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..comm import agreement
from ..comm import mesh as launching
from ..comm.collectives import AllReduce, Communicator, ProcessCommunicator
from ..comm.mesh import Launch
from ..errors import PlanError
from ..format import plan_json as codec
from ..format.fused_groups import adjacent_tensors
from ..format.header import ShardFile
from ..format.manifest import Manifest
from ..format.plan import Plan
from ..format.plan_json import of_sequence
from ..format.slices import Rows
from ..format.staged_names import held_by
from ..hub.fetch import Repository
from ..hub_options import Hub
from ..inference.generation import prepare_generation
from ..loaded import Loaded, remember, unwrapped
from ..parallel.boundary import settle_hooks
from ..parallel.build import parallelize, stored_tensors
from ..parallel.meta_model import build_model, find_class
from ..parallel.model_config import building_failed, read_config, read_generation_config
from . import rank_files
from .data_sharding import DataSharding
from .reading import Span, with_rows

if TYPE_CHECKING:
    # Imported here and in functions: modules that a job may not need. All of them would add 0.2 s to the
    # start.
    from ..adapters.adapter_set import AdapterSet
    from ..adapters.attaching import Attached
    from ..comm.stage_processes import StageProcesses
    from ..parallel.stage_model import StageModel
    from ..tensors.lazy_tensor import LazyTensor
    from .staged_models import StagedBuilder

AdapterDirectories = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
"""The directory of one adapter, or directories by the names that the adapters get."""

Stored = Callable[["Attached | None"], Generator[tuple[str, Tensor]]]
"""A function that yields a rank's tensors by their names in the model with the attached adapters."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The arguments of the caller."""

    path: str
    plan: str | None
    hub: Hub
    trust_remote_code: bool
    dtype: torch.dtype | None
    training: bool
    sequence_parallel: bool
    regather: bool | None
    gather_logits: bool | None
    verify: bool
    dequantize: bool
    all_reduce: str | None
    """The name of the function, which is compared between the ranks."""
    fuse: bool | None
    adapter: AdapterDirectories | None
    data_parallel: DataSharding | None
    over_mesh: bool
    """The ranks are the processes along a dim of a device mesh."""
    compiled: bool = False
    stages_per_process: int = 1

    @property
    def unknown_to_stages(self) -> dict[str, bool]:
        """Return the arguments that a model with stages does not support, and whether they were given."""
        return {
            "all_reduce=": self.all_reduce is not None,
            "compile=True with training=True": self.compiled and self.training,
        }

    @property
    def computed_dtype(self) -> torch.dtype | None:
        """Return the dtype in which modules compute; None for the dtype of the parameters."""
        settings = None if self.data_parallel is None else self.data_parallel.settings
        return (settings and settings.param_dtype) or self.dtype

    @property
    def form(self) -> dict[str, bool]:
        """Return the options of the form of the plan; empty for plain inference."""
        wanted = {"training": self.training, "sequence_parallel": self.sequence_parallel}
        return wanted if any(wanted.values()) else {}


@dataclass(frozen=True)
class CheckedSource:
    """A model that passed the checks so far."""

    directory: Path
    manifest: Manifest
    """The manifest; for an ordinary model, a manifest of its small files."""
    plan: Plan
    repository: Repository | None = None
    """The repository from which this rank's files are still to be downloaded."""
    files: rank_files.RankFiles | None = None
    """This rank's files, checked."""
    checkpoint: Mapping[str, LazyTensor] | None = None
    """Instead of files: the global weights of an ordinary model, not read."""
    in_wanted_dtypes: bool = False
    """Whether the weights of ``checkpoint`` have the dtypes in which the model is loaded, not the plan's."""
    adapters: AdapterSet | None = None
    more: tuple[CheckedSource, ...] = ()
    """The directories of this process's other stages."""

    @property
    def full_plan(self) -> Plan:
        """Return the plan of the model with its adapters."""
        return self.plan if self.adapters is None else self.adapters.plan

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all stages."""
        return self.plan.tp * (1 if self.plan.stages is None else self.plan.stages.count)

    @property
    def common_manifest(self) -> Manifest:
        """Return the manifest without the fields that differ between the directories of stages."""
        if self.plan.stages is None:
            return self.manifest
        plan = replace(self.plan, stages=replace(self.plan.stages, own=None))
        digest = codec.sha256(codec.dumps(plan))
        return replace(self.manifest, plan_sha256=digest, files=())

    @property
    def model(self) -> tuple[Path, Any, Plan, Repository | None]:
        """Return the directory, manifest, plan and repository, which are known before the model is built."""
        return self.directory, self.manifest, self.plan, self.repository

    def spans(self, sharding: DataSharding | None) -> Sequence[Span]:
        """Return the byte ranges of files that this process will read, as far as they are known."""
        if self.files is None:
            return ()
        own = self.files.spans if sharding is None else sharding.spans(self.files.shards)
        return [*own, *(span for other in self.more for span in other.spans(sharding))]


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
        from ..adapters.attaching import Adapter, attach

        assert self.checked.adapters is not None, "it has some"
        configs = {name: each.adapter.config for name, each in self.checked.adapters.adapters.items()}
        new = {name: Adapter(config) for name, config in configs.items()}
        model = unsharded(self.checked, self.wanted)
        return attach(model, new, trainable=True, initialized=False).wrapper

    def model(self, stored: Stored | None = None) -> nn.Module:
        """Build the model. Every process calls it, and all raise if one has an error.

        Args:
            stored: yields the tensors of this rank; None to read the files.
        """
        start, checked = self.start, self.checked
        place: StageProcesses | None = None
        if checked.plan.stages is not None:
            from .staged_models import place_of

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
                from ..inference.compiling import compile_model

                records = launching.can_capture(start)
                compile_model(model, cuda_graphs=records, same_bits=start.world_size > 1)
            else:
                from ..inference.staged_compiling import compile_stage

                compile_stage(model, start, place.link, same_bits=place.ranks.world_size > 1)
        if start.world_size > 1 or self.wanted.over_mesh or stays_packed(checked.plan, self.wanted):
            from .several_ranks import guard

            guard(model, start, comm, training=self.wanted.training, check_inputs=self.check_inputs)
        if self.wanted.data_parallel is not None:
            from ..training.fsdp import compare_replicas

            compare_replicas(model, self.all_ranks)
        settle_hooks(model)
        return built

    def _built(self, comm: Communicator, given: Stored | None, place: StageProcesses | None) -> nn.Module:
        """Build the model, or the ``PeftModel`` around it, without a message to other ranks."""
        checked, wanted, adapters = self.checked, self.wanted, self.checked.adapters
        start = self.start if place is None else place.ranks
        # The unsharded model, on meta, with its adapters.
        config, model = _unsharded(checked, wanted)
        attached = None if adapters is None else adapters.attach(model, trainable=wanted.training)
        # It was built in the wanted dtype, so other dtypes are those that its code keeps.
        dtypes = {} if wanted.dtype is None else {n: t.dtype for n, t in stored_tensors(model)}
        if attached is not None:
            dtypes |= attached.dtypes_of_model(checked.plan, dtypes)
        # Its plan, with adapters: `plan` covers all stages, `held_plan` the stages of this process.
        plan = held_plan = checked.full_plan
        staged: StagedBuilder | None = None
        if place is not None:
            from .staged_models import StagedBuilder

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
            from .packed_models import packed_modules

            packed = packed_modules(checked.directory, plan, config, start.device, comm, dtype, apart)
        heads: Sequence[str] = ()
        if attached is not None and plan.logits is not None:
            heads = attached.in_place_of(plan.logits.module)
        built_plan = replace(plan, fused=held_plan.fused)
        if wanted.form:
            from ..training.prepare import parallelize_for_training

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
            from ..training.stage_training import evaluate_in_passes

            evaluate_in_passes(model, stage)
        names = None if attached is None else replace(attached, wrapper=nn.Module(), tensors={})
        about = checked.directory.absolute(), checked.manifest, plan, self.start
        remember(model, Loaded(*about, packed is not None, self, names, stage))
        return (model if attached is None else attached.wrapper).eval()

    def _stored(
        self, held_plan: Plan, staged: StagedBuilder | None, attached: Attached | None, start: Launch
    ) -> Callable[[Rows], Generator[tuple[str, Tensor]]]:
        """Return a function that yields this process's local tensors, by their names in its model.

        Args:
            held_plan: the plan of the stages of this process, with adapters.
            staged: builds its stages; None for a model without stages.
            attached: the adapters.
            start: the ranks of the model, or of the stages.
        """
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


def unsharded(checked: CheckedSource, wanted: LoadOptions) -> nn.Module:
    """Build the model with global shapes on the meta device.

    Raises:
        PlanError: it cannot be built.
    """
    return _unsharded(checked, wanted)[1]


def _unsharded(checked: CheckedSource, wanted: LoadOptions) -> tuple[Any, nn.Module]:
    """Return the config as it was stored, and the unquantized model."""
    plan, directory = checked.plan, checked.directory
    stored = config = read_config(directory, checked.manifest, plan)
    if any(entry.packing is not None for entry in plan.parameters):
        from ..checkpoint.quantized import without_quantization

        config = without_quantization(config)
    dtype = wanted.dtype or getattr(torch, plan.model.dtype)
    try:
        find = partial(remote_class, directory) if plan.model.trust_remote_code else find_class
        return stored, build_model(find(plan.model.class_name), config, dtype, dict(plan.tied))
    except Exception as error:
        raise building_failed(directory, error) from error


def remote_class(directory: Path, class_name: str) -> type[nn.Module]:
    """Import a class from Python code in a directory.

    Raises:
        PlanError: the code is in another repository.
    """
    reference = class_name.replace(":", ".")
    if "--" in reference:
        raise PlanError(f"{directory}: the model class {reference!r} is code of another repository")
    found: type[nn.Module] = get_class_from_dynamic_module(reference, str(directory), local_files_only=True)
    return found


def stays_packed(plan: Plan, wanted: LoadOptions) -> bool:
    """Return whether modules compute with packed parameters as they are stored."""
    return not wanted.dequantize and any(entry.packing is not None for entry in plan.parameters)


def _connect(
    plan: Plan, wanted: LoadOptions, start: Launch, all_reduce: AllReduce | str | None
) -> ProcessCommunicator:
    """Make the process groups of all collectives that the wanted form of the model issues."""
    if isinstance(all_reduce, str):
        from ..comm.symmetric import connect_by_name

        return connect_by_name(all_reduce, start, lambda function: _connect(plan, wanted, start, function))
    if not wanted.form:
        return launching.connect(plan, start, all_reduce)
    from ..training.prepare import backward_axes

    used = of_sequence(plan) if wanted.sequence_parallel else plan
    return launching.connect(used, start, all_reduce, backward_axes(used) if wanted.training else ())


def _stored(checked: CheckedSource, plan: Plan, start: Launch, rows: Rows) -> Generator[tuple[str, Tensor]]:
    """Yield local tensors of this rank, from its own files or sliced from an ordinary checkpoint.

    Only the positions in ``rows`` of the first dim are read of the tensors that it names.
    """
    if checked.checkpoint is not None:
        weights, planned = checked.checkpoint, not checked.in_wanted_dtypes
        from .by_plan import local_tensors

        return local_tensors(plan, weights, start.rank, start.device, rows, in_planned_dtypes=planned)
    assert checked.files is not None
    adjacent: tuple[tuple[str, ...], ...] = ()
    if plan.fused:
        adjacent = adjacent_tensors(plan)
    shards: Sequence[ShardFile] = checked.files.shards
    if rows:
        shards = with_rows(shards, rows)
    return rank_files.tensors(shards, start.device, adjacent)
