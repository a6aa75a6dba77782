"""``load`` and ``parallelize``: the model of this rank, from files or from a model in memory."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.adapter_set import AdapterSet
from ..comm import agreement
from ..comm import mesh as launching
from ..comm.agreement import exchange
from ..comm.mesh import Launch, model_group
from ..default_modes import in_default_modes
from ..errors import CheckpointError, InputsDifferError, OptionError, PlanError, ShardconvError, SourceError
from ..files import fingerprint, manifest
from ..files.hub_downloads import find
from ..files.manifest import Manifest
from ..files.object_stores import ObjectDirectory, find_stored
from ..files.small_files import of_stage_of, variant
from ..files.stored_copies import copy_of
from ..files.tp_folders import folder_in
from ..format.plan import Plan
from ..hub_options import Hub, is_url, require_repo_id
from ..inference.compiling import warm_up_decoding
from ..keywords import checked_keywords
from ..loaded import LoadedModel, unwrapped
from ..option_values import Communication, Compiling, ExampleInputs, Planning, Training
from ..storage.reading import ReadAhead
from ..training.fsdp import DataParallel
from . import rank_files
from .building import ModelBuilder, transforms
from .checked_source import AdapterDirectories, CheckedSource, LoadOptions, stays_packed, unsharded
from .data_sharding import data_sharding
from .in_memory import in_memory, require_same_values
from .load_options import MOVED, REMEDIES, as_value, parse_dtype, with_further
from .loaded_adapters import guard_adapters
from .packed_models import require_packages
from .planned_here import is_ordinary, plan_on_rank_0, with_plan

M = TypeVar("M", bound=nn.Module)

# All ranks must load the same model: ranks of different ones would run, and compute nonsense.

FORM = (
    "dtype",
    "training",
    "data_parallel",
    "sequence_parallel",
    "regather",
    "stages_per_process",
    "gather_logits",
    "dequantize",
    "all_reduce",
)
"""Arguments of ``load`` that determine the computation of the ranks."""


def require_same(
    start: Launch, manifest: Manifest, options: object, adapters: AdapterSet | None = None
) -> None:
    """Compare the models that the ranks load; every rank calls it."""
    content = sha256(repr((manifest.plan_sha256, manifest.files, manifest.source.revision)).encode())
    form = ", ".join(f"{name}={getattr(options, name)}" for name in FORM)
    load_summary = {"conversion": f"{content.hexdigest()[:12]} of {manifest.source.name}", "form": form}
    if adapters is not None:
        load_summary["adapters"] = adapters.content
    summaries = exchange(start, load_summary)
    for what in load_summary:
        for rank, theirs in enumerate(summaries):
            if theirs.get(what) != summaries[0].get(what):
                raise InputsDifferError(
                    f"the ranks must load the same {what}: rank 0 loads {summaries[0].get(what)}, and rank "
                    f"{rank} loads {theirs.get(what)}; give all ranks the same files and arguments"
                )


@in_default_modes
@checked_keywords(MOVED, REMEDIES)
def load(
    path: str | os.PathLike[str],
    *,
    plan: str | os.PathLike[str] | Plan | Planning | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    training: bool | Training = False,
    data_parallel: bool | DataParallel = False,
    sequence_parallel: bool = False,
    compile: bool | Compiling = False,
    gather_logits: bool | None = None,
    fuse: bool | None = None,
    dequantize: bool = False,
    adapter: AdapterDirectories | None = None,
    verify: bool = False,
    trust_remote_code: bool = False,
    hub: Hub | None = None,
    communication: Communication | None = None,
) -> LoadedModel:
    """Load this rank's part of a model; call it on every rank of the job.

    The model may be converted, or ordinary: rank 0 then plans it, which takes seconds, and keeps the plan in
    a cache for the next start. Every rank reads only its own slices of the checkpoint. Convert a model to
    check its plan numerically, to start faster, and to download only the files of a rank.

    If there is no process group, ``load`` starts one from the environment of torchrun: nccl on GPUs, gloo
    on the CPU. If one rank has an error, every rank raises it before the first collective. Parameters
    require gradients only with ``training``.

    ``generate`` returns the same tokens on every rank. Call it on all ranks with the same arguments, which
    are compared. Every rank's ``streamer`` gets the tokens (a ``TextStreamer`` prints only on rank 0). Rank
    0 decides ``max_time``.

    Args:
        path: directory that ``shardconv convert`` wrote, or the id of a Hub repository with one. This
            rank's files are then downloaded to the cache. If the repository has several directories
            ``tp-N/``, ``load`` uses the one for the number of processes. Or an ordinary model, local or on
            the Hub, of which this rank reads only its part. Bytes of its safetensors on the Hub are not
            cached. Or the URL of either in an object store, such as ``s3://bucket/model``. With ``hub``'s
            ``cache_dir``, this rank's converted files are copied there first, once for all ranks of a host.
        plan: for an ordinary model, a plan that was made for it: a file (``shardconv plan MODEL -o FILE``), a
            directory with one, ``user/repo/plan.json`` on the Hub, or the value of ``shardconv.plan``; or a
            ``Planning(...)`` with which it is planned now. By default it is planned for all processes.
        device: the device; by default the GPU to which the process is bound (``torch.cuda.set_device``), then
            ``cuda:LOCAL_RANK``, then the CPU. With nccl, each rank needs its own GPU.
        dtype: dtype of the parameters, as in ``from_pretrained``: parameters that the model's code keeps in
            float32 stay in float32. By default, and with ``"auto"``, the stored dtype. Names such as
            ``"bf16"`` work as well.
        process_group: the processes that load this model, as many as the plan's tp; by default all.
        mesh: a mesh of all processes, instead of ``process_group``. The processes along the dim named "tp"
            load one model together; with stages, those along "pp" (an outer dim) and "tp". The other dims
            are for data parallelism, see ``shardconv_runtime.data_parallel``.
        training: add the backward collectives of the plan; True, or a ``Training(...)``. Parameters require
            gradients as in the unsharded model, and the gradients equal the unsharded model's. Call
            ``train()`` for dropout.
        data_parallel: apply FSDP2 as ``shardconv_runtime.data_parallel`` does, with its defaults (True) or
            a ``DataParallel(...)``. Each process then reads and holds only its part of the rank's
            parameters.
        sequence_parallel: shard the activations between the parallel blocks over the sequence. The plan
            must have been made with ``--sequence-parallel``. Lengths that tp does not divide are padded
            internally.
        compile: run each forward pass as one compiled graph, and let ``generate`` run one graph per token
            (on GPUs a CUDA graph); True, or a ``Compiling(...)``. ``torch.compile(model)`` works as well.
            With stages, a graph contains the code of a stage between its messages, and tokens are chosen
            outside of it.
        gather_logits: if False, each rank keeps its shard of the logits' last dim. The model then rejects
            ``generate`` and, unless it was loaded for training, labels. With ``training``, the loss is
            computed from the shards, and by default no logits are returned in training mode with labels;
            True returns full logits.
        fuse: combine layers with the same input (query, key and value; gate and up) into one product. It is
            not for training, nor for formats that pack columns first (GPTQ, AWQ). By default only with
            ``compile`` on a GPU: eager steps, and CPUs, gain nothing.
        dequantize: convert packed weights of a quantized model to the model's dtype while loading. By
            default they stay packed, and the modules of the format compute with them.
        adapter: directory that ``shardconv adapt`` wrote for ``path``, or a dict from adapter names to
            directories, of which the first is active. With ``training``, only their parameters require
            gradients.
        verify: read this rank's files in full and compare their checksums with the manifest.
        trust_remote_code: allow a model with code in ``path`` to run that code.
        hub: how the Hub is reached: ``Hub(revision=..., cache_dir=..., local_files_only=..., token=...)``.
        communication: how the ranks talk to each other: time limits, another all-reduce, checks.

    Returns:
        The transformers model in eval mode, with its original class; with ``adapter``, a ``peft.PeftModel``
        around it.

    Raises:
        ShardconvError: the message names the problem, the rank and the remedy.

    Example:
        >>> model = shardconv_runtime.load("out/")
        >>> logits = model(input_ids).logits
        >>> model = shardconv_runtime.load("user/model-tp", hub=Hub(revision="0123abc..."))
        >>> model = shardconv_runtime.load("user/original")
        >>> model = shardconv_runtime.load("user/original", plan="plan.json")
    """
    trained, compiling = as_value("training", training, Training), as_value("compile", compile, Compiling)
    options = LoadOptions(
        path=os.fspath(path),
        plan=plan if plan is None or isinstance(plan, Plan | Planning) else os.fspath(plan),
        hub=as_value("hub", hub, Hub) or Hub(),
        trust_remote_code=trust_remote_code,
        verify=verify,
        dtype=parse_dtype(dtype),
        mesh=mesh,
        training=trained,
        data_parallel=data_sharding(mesh, data_parallel, training=bool(trained), compiled=bool(compiling)),
        sequence_parallel=sequence_parallel,
        compiling=compiling,
        gather_logits=gather_logits,
        fuse=fuse,
        dequantize=dequantize,
        adapter=adapter,
        communication=as_value("communication", communication, Communication) or Communication(),
    )
    return load_model(options, process_group, device)


@in_default_modes
@checked_keywords(MOVED, REMEDIES)
def parallelize(
    model: M,
    example_inputs: ExampleInputs | None = None,
    *,
    plan: Plan | Planning | None = None,
    device: torch.device | str | None = None,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    training: bool | Training = False,
    data_parallel: bool | DataParallel = False,
    sequence_parallel: bool = False,
    compile: bool | Compiling = False,
    gather_logits: bool | None = None,
    fuse: bool | None = None,
    communication: Communication | None = None,
) -> M:
    """Return this rank's part of a model in memory; call it on every rank of the job.

    Rank 0 plans the model, which takes seconds; nothing is read from a disk or a network. The model that is
    passed does not change, and the one that is returned shares no memory with it: drop the first one to free
    its memory. All ranks must pass a model with the same values, which is checked. For a model on meta, the
    returned one is on meta too, with local shapes.

    Args:
        model: an ``nn.Module`` or a model of transformers, neither quantized nor sharded, without adapters.
        example_inputs: the keyword arguments of a call, with which a module that is not of transformers is
            traced; or a function that returns them for the model's ``config``, or a file of them.
        plan: a plan that ``shardconv.plan`` returned for this model, or a ``Planning(...)``. By default the
            model is planned for all processes.
        device: as in ``load``, like the arguments that follow.

    Returns:
        A model of the same class in eval mode, in the dtypes of the one that was passed.

    Raises:
        ShardconvError: the message names the problem, the rank and the remedy.

    Example:
        >>> model = shardconv_runtime.parallelize(MyModule(), example_inputs={"x": torch.randn(2, 16)})
        >>> model = shardconv_runtime.parallelize(AutoModel.from_config(config), training=True)
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"parallelize takes an nn.Module, got a {type(model).__name__}; load takes paths and Hub ids"
        )
    if example_inputs is not None:
        if isinstance(plan, Plan):
            raise OptionError("example_inputs= is for planning, and plan= is a plan; leave one out")
        planning = plan or Planning()
        if planning.example_inputs is not None:
            raise OptionError(
                "example_inputs= and plan=Planning(example_inputs=) are the same; leave one out"
            )
        plan = replace(planning, example_inputs=example_inputs)
    trained, compiling = as_value("training", training, Training), as_value("compile", compile, Compiling)
    options = LoadOptions(
        path=type(model).__name__,
        plan=plan,
        in_memory=in_memory(model),
        mesh=mesh,
        training=trained,
        data_parallel=data_sharding(mesh, data_parallel, training=bool(trained), compiled=bool(compiling)),
        sequence_parallel=sequence_parallel,
        compiling=compiling,
        gather_logits=gather_logits,
        fuse=fuse,
        communication=as_value("communication", communication, Communication) or Communication(),
    )
    return load_model(options, process_group, device)  # type: ignore[return-value]


def load_model(
    options: LoadOptions, process_group: dist.ProcessGroup | None, device: torch.device | str | None
) -> LoadedModel:
    """Check the source of a model on every rank, agree on it, and build the model."""
    group = process_group if options.mesh is None else model_group(options.mesh, process_group)
    try:
        device = None if device is None else torch.device(device)
    except RuntimeError as unknown:
        raise OptionError(f"device={device!r} is not a device of torch; pass for example 'cpu'") from unknown
    sharding, stages_per_process = options.data_parallel, options.stages_per_process
    checked: CheckedSource | None = None
    error: Exception | None = None
    try:
        checked = _find_checked(options, group)
    except Exception as failure:  # perhaps of this rank only: `agree` raises it, on all ranks
        error = failure
    if checked is not None:
        launching.check_world_size(checked.plan, group, stages_per_process)
    with ReadAhead(() if checked is None else checked.spans(sharding)) as ahead:
        start = _launch(group, device, options.communication.timeout_s, error)
        all_ranks = start if sharding is None else sharding.processes(start)
        agreement.agree(all_ranks, error)
        if _without_plan(all_ranks, checked):
            planned = plan_on_rank_0(options, start)
            checked = agreement.together(all_ranks, lambda: _checked(with_plan(options, planned), options, 0))
        assert checked is not None, "agree has raised the error"
        if options.in_memory is not None:
            require_same_values(options.in_memory, all_ranks)
        if start.control is not None:
            require_same(all_ranks, checked.common_manifest, options, checked.adapters)
            agreement.require_own_gpus(start)
        if stays_packed(checked.plan, options):
            compiled = options.compiling is not None
            needs = partial(require_packages, *checked.model, start.device, options.dtype, compiled=compiled)
            agreement.together(all_ranks, needs, agreement.DOWNLOAD_TIMEOUT_S)
        if checked.repository is not None:
            fetch = partial(_with_files, checked, start.rank)
            checked = agreement.together(all_ranks, fetch, agreement.DOWNLOAD_TIMEOUT_S)
        model: Any = ModelBuilder(checked, options, start, all_ranks).model()
        if start.device.type != "cpu":
            ahead.stop()  # all was read; the CPU's mapped files are read until their first use
    if options.adapter is not None:
        guard_adapters(model)
    if options.compiling is not None and options.compiling.warm_up:
        warm_up_decoding(unwrapped(model), options.compiling.warm_up)
    return cast(LoadedModel, model)


def _without_plan(all_ranks: Launch, checked: CheckedSource | None) -> bool:
    """Return whether the ranks have found a model that has no plan yet; all must have found the same."""
    lack_plan = agreement.exchange(all_ranks, checked is None)
    if len(set(lack_plan)) > 1:
        first, other = lack_plan.index(True), lack_plan.index(False)
        raise InputsDifferError(
            f"rank {first} finds an ordinary model, and rank {other} one that was converted or has a plan; "
            "give all ranks the same files and arguments"
        )
    return lack_plan[0]


def _find_checked(options: LoadOptions, group: dist.ProcessGroup | None) -> CheckedSource | None:
    """Run the checks that take little time; None for a model that is still to be planned."""
    rank, world_size = launching.rank(group), launching.world_size(group)
    num_ranks = world_size * max(1, options.stages_per_process)  # of all stages
    source = _find_source(options, rank, num_ranks)
    return None if source is None else _checked(source, options, rank)


def _checked(source: CheckedSource, options: LoadOptions, rank: int) -> CheckedSource:
    """Check that a model can be loaded so, and the files of a rank if they are here."""
    directory, solved = source.directory, source.plan
    if solved.model.trust_remote_code and not options.trust_remote_code:
        raise PlanError(
            f"{directory}: the model runs Python code from its own directory; "
            "read that code, then pass trust_remote_code=True"
        )
    fingerprint.check_code(solved)
    if options.adapter is not None:
        adapters = AdapterSet.read(options.adapter, solved, lambda: unsharded(source, options)[1])
        source = replace(source, adapters=adapters)
    for transform in transforms(source, options):
        transform.check(source.full_plan)
    if options.stages_per_process != 1:
        source = with_further(source, options.stages_per_process)
    if options.verify and not source.has_shards:
        raise OptionError("verify=True: an ordinary checkpoint has no checksums; leave it out, or convert")
    if source.repository is None and source.has_shards and rank < source.num_ranks:
        return _with_files(source, rank)
    return source


def _find_source(options: LoadOptions, rank: int, world_size: int) -> CheckedSource | None:
    """Find the manifest and plan of a converted directory, or an ordinary model that a plan shards.

    Returns:
        None for an ordinary model without a plan.
    """
    if options.plan is not None or options.in_memory is not None:
        if options.plan is None or isinstance(options.plan, Planning):
            return None
        return with_plan(options, options.plan)
    if is_url(options.path):
        stored = find_stored(options.path, world_size, rank)
        return None if stored is None else _stored_source(*stored, options.hub.cache_dir)
    directory = Path(options.path).expanduser()
    if directory.is_dir():
        if not (directory / manifest.MANIFEST_NAME).is_file():
            directory = of_stage_of(variant(directory, world_size), rank, world_size)
        if is_ordinary(directory):
            return None
        described = manifest.read(directory)
        return CheckedSource(directory, described, manifest.read_plan(directory, described))
    _require_hub_id(options.path)
    there = find(options.path, options.hub, world_size, rank)
    if there is None:
        return None
    repository, described = there
    directory = repository.directory
    return CheckedSource(directory, described, manifest.read_plan(directory, described), repository)


def _stored_source(
    there: ObjectDirectory, directory: Path, cache_dir: str | os.PathLike[str] | None
) -> CheckedSource:
    """Return a converted directory in an object store, which is read from there or from a copy."""
    if cache_dir is not None:
        copy = copy_of(there, directory, cache_dir)
        described = manifest.read(copy.directory)
        return CheckedSource(copy.directory, described, manifest.read_plan(copy.directory, described), copy)
    described = manifest.read(directory)
    return CheckedSource(directory, described, manifest.read_plan(directory, described), objects=there)


def _require_hub_id(path: str) -> None:
    """Refuse a path that does not exist."""
    try:
        if os.path.lexists(Path(path).expanduser()):
            raise SourceError(f"{path} is not a directory")
        require_repo_id(folder_in(path)[0])
    except SourceError as error:
        raise CheckpointError(
            f"{error}; give a directory that `shardconv convert` wrote, or a model's directory or Hub id"
        ) from error


def _with_files(source: CheckedSource, rank: int) -> CheckedSource:
    """Download a rank's files if they are missing, and check them."""
    place = rank % source.plan.tp  # its number within its stage
    more = tuple(_with_files(each, rank) for each in source.more)
    if source.repository is not None:
        source.repository.fetch(source.manifest.files_of(place))
    files = rank_files.check_files(source.directory, source.manifest, source.plan, place, source.objects)
    return replace(source, files=files, more=more)


def _launch(
    group: dist.ProcessGroup | None,
    device: torch.device | str | None,
    timeout_s: float | None,
    error: Exception | None,
) -> Launch:
    """Join the other ranks. If the directory has an error too, that one is raised, since it explains more."""
    try:
        return launching.launch(group, device, timeout_s)
    except ShardconvError as failure:
        if error is not None:
            raise error from failure
        raise
