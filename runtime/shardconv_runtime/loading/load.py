"""From a converted directory to the model of this rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.adapter_set import AdapterSet
from ..comm import agreement
from ..comm import mesh as launching
from ..comm.agreement import exchange
from ..comm.collectives import AllReduce
from ..comm.mesh import Launch, model_group
from ..default_modes import in_default_modes
from ..errors import CheckpointError, LaunchError, PlanError, ShardconvError
from ..files import fingerprint, manifest
from ..files.hub_downloads import find
from ..files.manifest import Manifest
from ..files.reading import ReadAhead
from ..files.small_files import of_stage_of, variant
from ..files.tp_folders import folder_in
from ..hub_options import Hub, looks_like_path
from ..inference.compiling import warm_up_decoding
from ..loaded import unwrapped
from ..training.fsdp import DataParallel
from . import rank_files
from .building import ModelBuilder, transforms
from .by_plan import ordinary
from .checked_source import AdapterDirectories, CheckedSource, LoadOptions, stays_packed, unsharded
from .data_sharding import DataSharding, data_sharding
from .load_options import parse_dtype, refuse_options, with_further
from .loaded_adapters import guard_adapters
from .packed_models import require_packages

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
                raise LaunchError(
                    f"the ranks must load the same {what}: rank 0 loads {summaries[0].get(what)}, and rank "
                    f"{rank} loads {theirs.get(what)}; give all ranks the same files and arguments"
                )


@in_default_modes
def load(
    path: str | os.PathLike[str],
    *,
    plan: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    training: bool = False,
    data_parallel: DataParallel | bool = False,
    sequence_parallel: bool = False,
    regather: bool | None = None,
    compile: bool = False,
    warm_up: Sequence[tuple[int, int]] = (),
    gather_logits: bool | None = None,
    timeout_s: float | None = None,
    all_reduce: AllReduce | str | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    verify: bool = False,
    dequantize: bool = False,
    fuse: bool | None = None,
    adapter: AdapterDirectories | None = None,
    check_inputs: bool = False,
    stages_per_process: int = 1,
    **other: Any,
) -> Any:
    """Load this rank's part of a converted model; call it on every rank of the job.

    If there is no process group, ``load`` starts one from the environment of torchrun: nccl on GPUs, gloo
    on the CPU. If one rank has an error, every rank raises it before the first collective. Parameters
    require gradients only with ``training``.

    ``generate`` returns the same tokens on every rank. Call it on all ranks with the same arguments, which
    are compared. Every rank's ``streamer`` gets the tokens (a ``TextStreamer`` prints only on rank 0). Rank
    0 decides ``max_time``.

    Args:
        path: directory that ``shardconv convert`` wrote, or the id of a Hub repository with one. This
            rank's files are then downloaded to the cache. If the repository has several directories
            ``tp-N/``, ``load`` uses the one for the number of processes.
        plan: a plan (``shardconv plan --format json``), a directory with one, or ``user/repo/plan.json`` on
            the Hub. ``path`` is then an ordinary model, local or on the Hub, of which this rank reads only
            its part. Bytes of safetensors on the Hub are not cached.
        device: the device; by default the GPU to which the process is bound (``torch.cuda.set_device``), then
            ``cuda:LOCAL_RANK``, then the CPU. With nccl, each rank needs its own GPU.
        dtype: dtype of the parameters, as in ``from_pretrained``: parameters that the model's code keeps in
            float32 stay in float32. By default the stored dtype.
        group: the processes that load this model, as many as the plan's tp; by default all.
        mesh: a mesh of all processes, instead of ``group``. The processes along the dim named "tp" load one
            model together; with stages, those along "pp" (an outer dim) and "tp". The other dims are for
            data parallelism, see ``shardconv_runtime.data_parallel``.
        training: add the backward collectives of the plan. Parameters require gradients as in the unsharded
            model, and the gradients equal the unsharded model's. Call ``train()`` for dropout.
        data_parallel: apply FSDP2 as ``shardconv_runtime.data_parallel`` does, with its defaults (True) or
            a ``DataParallel(...)``. Each process then reads and holds only its part of the rank's
            parameters.
        sequence_parallel: shard the activations between the parallel blocks over the sequence. The plan
            must have been made with ``--sequence-parallel``. Lengths that tp does not divide are padded
            internally.
        regather: keep, in training with sequence parallelism, only this rank's part of gathered activations,
            and gather them again in the backward pass. By default this applies to activations of 1 MiB and
            more.
        compile: run each forward pass as one compiled graph, and let ``generate`` run one graph per token
            (on GPUs a CUDA graph). ``torch.compile(model)`` works as well. With stages, a graph contains
            the code of a stage between its messages, and tokens are chosen outside of it.
        warm_up: sizes ``(batch, length in tokens)`` for which, with ``compile``, decoding is compiled and
            recorded before this call returns, the largest first.
        gather_logits: if False, each rank keeps its shard of the logits' last dim. The model then rejects
            ``generate`` and, unless it was loaded for training, labels. With ``training``, the loss is
            computed from the shards, and by default no logits are returned in training mode with labels;
            True returns full logits.
        timeout_s: how long a rank waits for the others in a collective, if this call starts the process
            group; by default torch's timeout (10 minutes for nccl, 30 for gloo). With gloo it then raises
            an error; with nccl, torch's watchdog ends the process. It is also the time that a rank waits
            for ranks that do not call ``generate`` (by default 5 minutes).
        all_reduce: a function that sums a contiguous tensor over the process group of a name, in place of
            torch's. It must not write to its argument. For a compiled model, Dynamo must be able to trace
            it. ``"symmetric"`` sums small tensors in symmetric memory.
        revision: branch, tag or commit on the Hub. Only a commit never changes.
        cache_dir: directory of the Hub cache.
        local_files_only: read all files from the Hub cache, as with HF_HUB_OFFLINE.
        token: Hub token; by default the token of the Hub login.
        trust_remote_code: allow a model with code in ``path`` to run that code.
        verify: read this rank's files in full and compare their checksums with the manifest.
        dequantize: convert packed weights of a quantized model to the model's dtype while loading. By
            default they stay packed, and the modules of the format compute with them.
        fuse: combine layers with the same input (query, key and value; gate and up) into one product. It is
            not for training, nor for formats that pack columns first (GPTQ, AWQ). By default only with
            ``compile`` on a GPU: eager steps, and CPUs, gain nothing.
        adapter: directory that ``shardconv adapt`` wrote for ``path``, or a dict from adapter names to
            directories, of which the first is active. With ``training``, only their parameters require
            gradients.
        check_inputs: compare the inputs of every call between the ranks, as with
            ``SHARDCONV_CHECK_INPUTS=1``. By default the calls 1, 2, 4, 8 ... are compared.
        stages_per_process: number of stages that each process trains, for interleaved schedules of
            ``shardconv_runtime.Pipeline``.
        other: catches options of ``from_pretrained``, which raise an error with their name.

    Returns:
        The transformers model in eval mode, with its original class; with ``adapter``, a ``peft.PeftModel``
        around it.

    Raises:
        ShardconvError: the message names the problem, the rank and the remedy.

    Example:
        >>> model = shardconv_runtime.load("out/")
        >>> logits = model(input_ids).logits
        >>> model = shardconv_runtime.load("user/model-tp", revision="0123abc...")
        >>> model = shardconv_runtime.load("user/original", plan="plan.json")
    """
    if warm_up and not compile:
        raise PlanError("warm_up= is about compiled decoding; pass compile=True too, or leave it out")
    if regather is not None and not (training and sequence_parallel):
        raise PlanError("regather= is about training with sequence_parallel=True; leave it out")
    if other:
        refuse_options(other)
    if mesh is not None:
        group = model_group(mesh, group)
    sharding: DataSharding | None = None
    if data_parallel:
        sharding = data_sharding(mesh, data_parallel, training=training, compiled=compile)
    options = LoadOptions(
        path=os.fspath(path),
        plan=None if plan is None else os.fspath(plan),
        hub=Hub(revision, cache_dir, local_files_only, token),
        trust_remote_code=trust_remote_code,
        dtype=parse_dtype(dtype),
        training=training,
        sequence_parallel=sequence_parallel,
        regather=regather,
        gather_logits=gather_logits,
        verify=verify,
        dequantize=dequantize,
        all_reduce=all_reduce if isinstance(all_reduce, str) else all_reduce and "a function",
        fuse=fuse,
        adapter=adapter,
        data_parallel=sharding,
        over_mesh=mesh is not None,
        compiled=compile,
        stages_per_process=stages_per_process,
    )
    checked: CheckedSource | None = None
    error: Exception | None = None
    try:
        checked = _check(options, group)
    except Exception as failure:  # perhaps of this rank only: `agree` raises it, on all ranks
        error = failure
    if checked is not None:
        launching.check_world_size(checked.plan, group, stages_per_process)
    with ReadAhead(() if checked is None else checked.spans(sharding)) as ahead:
        start = _launch(group, device, timeout_s, error)
        all_ranks = start if sharding is None else sharding.processes(start)
        agreement.agree(all_ranks, error)
        assert checked is not None, "agree has raised the error"
        if start.control is not None:
            require_same(all_ranks, checked.common_manifest, options, checked.adapters)
            agreement.require_own_gpus(start)
        if stays_packed(checked.plan, options):
            needs = partial(require_packages, *checked.model, start.device, options.dtype, compiled=compile)
            agreement.together(all_ranks, needs, agreement.DOWNLOAD_TIMEOUT_S)
        if checked.repository is not None:
            fetch = partial(_with_files, checked, start.rank)
            checked = agreement.together(all_ranks, fetch, agreement.DOWNLOAD_TIMEOUT_S)
        building = ModelBuilder(checked, options, start, all_ranks, all_reduce, check_inputs=check_inputs)
        model = building.model()
        if start.device.type != "cpu":
            ahead.stop()  # all was read; the CPU's mapped files are read until their first use
    if adapter is not None:
        guard_adapters(model)
    if warm_up:
        warm_up_decoding(unwrapped(model), warm_up)
    return model


def _check(options: LoadOptions, group: dist.ProcessGroup | None) -> CheckedSource:
    """Run the checks that take little time."""
    rank, world_size = launching.rank(group), launching.world_size(group)
    num_ranks = world_size * max(1, options.stages_per_process)  # of all stages
    source = _find_source(options, rank, num_ranks)
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
    if options.verify and source.checkpoint is not None:
        raise PlanError("verify=True: an ordinary checkpoint has no checksums; leave it out, or convert")
    if source.repository is None and source.checkpoint is None and rank < source.num_ranks:
        return _with_files(source, rank)
    return source


def _find_source(options: LoadOptions, rank: int, world_size: int) -> CheckedSource:
    """Find the manifest and plan of a converted directory, or an ordinary model that a plan shards."""
    if options.plan is not None:
        return ordinary(
            options.path,
            options.plan,
            options.hub,
            trust_remote_code=options.trust_remote_code,
            dtype=options.dtype,
        )
    directory = Path(options.path).expanduser()
    if directory.is_dir():
        if not (directory / manifest.MANIFEST_NAME).is_file():
            directory = of_stage_of(variant(directory, world_size), rank, world_size)
        described = manifest.read(directory)
        return CheckedSource(directory, described, manifest.read_plan(directory, described))
    if directory.exists() or "/" not in options.path or looks_like_path(folder_in(options.path)[0]):
        raise CheckpointError(
            f"{options.path}: no such directory; give the directory that `shardconv convert` wrote, or the "
            "id of a repository on the Hub"
        )
    repository, described = find(options.path, options.hub, world_size, rank)
    directory = repository.directory
    return CheckedSource(directory, described, manifest.read_plan(directory, described), repository)


def _with_files(source: CheckedSource, rank: int) -> CheckedSource:
    """Download a rank's files if they are missing, and check them."""
    place = rank % source.plan.tp  # its number within its stage
    more = tuple(_with_files(each, rank) for each in source.more)
    if source.repository is not None:
        source.repository.fetch(source.manifest.files_of(place))
    files = rank_files.check_files(source.directory, source.manifest, source.plan, place)
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
