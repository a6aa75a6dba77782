"""From a converted directory to the model of this rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm import agreement
from ..comm import mesh as launching
from ..comm.collectives import AllReduce, Communicator, ProcessCommunicator
from ..comm.mesh import Launch
from ..errors import PlanError, ShardconvError
from ..format import fingerprint, manifest
from ..format.plan import Plan
from ..hub_options import Hub
from ..inference.generation import prepare_generation
from ..loaded import Loaded, remember, unwrapped
from ..parallel.build import parallelize
from ..parallel.meta_model import build_model, find_class
from ..parallel.model_config import building_failed, read_config, read_generation_config
from . import rank_files
from .read_ahead import ReadAhead

if TYPE_CHECKING:
    from ..adapters.adapter_set import AdapterSet

    # Imported where they are used: most jobs load a local directory for inference, and need none of it.
    from ..hub.fetch import Repository
    from ..tensors.lazy_tensor import LazyTensor

T = TypeVar("T")

AdapterDirectories = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
"""One, or several by the names that the adapters get."""


def load(
    path: str | os.PathLike[str],
    *,
    plan: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    training: bool = False,
    sequence_parallel: bool = False,
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
    **other: Any,
) -> Any:
    """Load this rank's part of a converted model; every rank of the job calls it.

    The process group is started from torchrun's environment where there is none: nccl on GPUs, gloo on
    the CPU. If a rank has an error, every rank raises before the first collective of the model. Parameters
    require gradients only with ``training``.

    ``generate`` gives the same tokens on every rank. All ranks must call it with the same arguments, which
    is checked; a ``streamer`` gets tokens on rank 0 only, and ``max_time`` goes by rank 0's clock.

    Args:
        path: directory that ``shardconv convert`` wrote, or the id of a repository on the Hub to which one
            was pushed: this rank's files are downloaded to the cache. Where it holds several in ``tp-N/``,
            the one for as many ranks as there are processes is taken.
        plan: a plan (``shardconv plan --format json``), a directory that has one, or
            ``user/repo/plan.json`` on the Hub. ``path`` then is an ordinary model, local or on the Hub, of
            which this rank reads its part: of safetensors on the Hub only its own bytes, which are not kept
            in the cache.
        device: by default the GPU to which the process is bound (``torch.cuda.set_device``), else
            ``cuda:LOCAL_RANK``, else the CPU. Over nccl each rank needs a GPU of its own.
        dtype: for the floating-point parameters; by default as they are stored.
        group: the processes that load this model, as many as the plan's tp; by default all.
        mesh: instead of ``group``, all processes: those along the dim named "tp" load one model together; the
            other dims are for data parallelism, see ``data_parallel``.
        training: with the backward collectives of the plan: parameters require gradients as in the unsharded
            model, and their gradients are those of the unsharded model. Call ``train()`` for dropout.
        sequence_parallel: shard the activations between the parallel blocks over the sequence; the plan must
            have been made with ``--sequence-parallel``. Lengths that tp does not divide are padded inside.
        compile: run each forward pass as one compiled graph, and let ``generate`` decode with one graph for
            each token, on GPUs a CUDA graph. ``torch.compile(model)`` works as well.
        warm_up: with ``compile``, sizes ``(batch, length in tokens)`` for which to compile and record
            decoding before this call returns; the largest first.
        gather_logits: if False, each rank keeps its shard of the logits' last dim. The model then
            refuses ``generate`` and, unless it was loaded for training, labels. With ``training``, the loss
            is computed from the shards, and by default no logits are returned in training mode where there
            are labels; True returns full ones.
        timeout_s: how long a rank waits in a collective for the others before it raises, where this call
            starts the process group; torch's default if None (10 minutes for nccl, 30 for gloo). Also for
            ranks that do not call ``generate`` with the others (5 minutes).
        all_reduce: sums a contiguous tensor over the process group of a name, in place of torch's own, for
            collectives that suit the machine better. It must not write to its argument; a compiled model
            needs a function that Dynamo can trace. ``"symmetric"`` sums small tensors in symmetric memory.
        revision: branch, tag or commit on the Hub; only a commit never changes.
        cache_dir, local_files_only, token: of the Hub's client. With ``local_files_only``, or HF_HUB_OFFLINE
            set, all files are read from the cache.
        trust_remote_code: allow a model whose code is in ``path`` to run that code.
        verify: read this rank's files once before, and compare their checksums with those in the manifest.
        dequantize: of a quantized model, multiply packed weights out into the model's dtype while loading, so
            that the plain model runs; without it they stay packed, and the format's own modules compute.
        fuse: compute the products of one input (queries, keys and values; gate and up) as one, as the plan
            says; not for training. By default only with ``compile``: an eager step's host gains nothing.
        adapter: directory that ``shardconv adapt`` wrote for ``path``, or several by the names that the
            adapters get, of which the first is active. With ``training``, their parameters alone require
            gradients.
        check_inputs: compare the inputs of every call between the ranks; so does the environment variable
            ``SHARDCONV_CHECK_INPUTS=1``. Those of the calls 1, 2, 4, 8 ... are compared anyway.
        other: no others; those of ``from_pretrained`` are refused by name.

    Returns:
        The transformers model in eval mode, with the class that it had when converted; with ``adapter``, a
        ``peft.PeftModel`` around it.

    Raises:
        ShardconvError: the message has the problem, the rank and the remedy.

    Example:
        >>> model = shardconv_runtime.load("out/")
        >>> logits = model(input_ids).logits
        >>> model = shardconv_runtime.load("user/model-tp", revision="0123abc...")
        >>> model = shardconv_runtime.load("user/original", plan="plan.json")
    """
    if warm_up and not compile:
        raise PlanError("warm_up= is about compiled decoding; pass compile=True too, or leave it out")
    if other:
        from .other_options import refuse_options

        refuse_options(other)
    if mesh is not None:
        from ..comm.tp_dim import tp_group

        group = tp_group(mesh, group)
    wanted = _Wanted(
        os.fspath(path),
        None if plan is None else os.fspath(plan),
        Hub(revision, cache_dir, local_files_only, token),
        trust_remote_code,
        _dtype(dtype),
        training,
        sequence_parallel,
        gather_logits,
        verify,
        dequantize,
        all_reduce if isinstance(all_reduce, str) else all_reduce and "a function",
        compile if fuse is None else fuse,
        adapter,
    )
    checked, error = _attempt(lambda: _check(wanted, group))
    if checked is not None:
        launching.check_world_size(checked.plan, group)
    with ReadAhead(checked.paths if checked is not None else ()) as ahead:
        start = _launch(group, device, timeout_s, error)
        agreement.agree(start, error)
        assert checked is not None, "agree has raised the error"
        if start.control is not None:
            from ..comm.own_gpus import require_own_gpus
            from .same_model import require_same

            require_same(start, checked.manifest, wanted, checked.adapters)
            require_own_gpus(start)
        if _stays_packed(checked.plan, wanted):
            from .packed_models import require_packages

            _, error = _attempt(
                lambda: require_packages(*checked.model, start.device, wanted.dtype, compiled=compile)
            )
            agreement.agree(start, error, agreement.DOWNLOAD_TIMEOUT_S)
        if checked.repository is not None:
            fetched, error = _attempt(lambda: _with_files(checked, start.rank))
            agreement.agree(start, error, agreement.DOWNLOAD_TIMEOUT_S)
            assert fetched is not None, "agree has raised the error"
        else:
            fetched = checked
        comm, error = _attempt(lambda: _connect(checked.full_plan, wanted, start, all_reduce))
        agreement.agree(start, error, agreement.CONNECT_TIMEOUT_S)
        assert comm is not None, "agree has raised the error"
        timeout = agreement.READ_TIMEOUT_S if checked.checkpoint is None else agreement.DOWNLOAD_TIMEOUT_S
        built, error = _attempt(lambda: _build(fetched, start, comm, wanted))
        agreement.agree(start, error, timeout)
        assert built is not None, "agree has raised the error"
        model = unwrapped(built)
        if start.device.type != "cpu":
            ahead.stop()  # all was read; the CPU's mapped files are read until their first use
    if compile:
        from ..inference.compiling import compile_model

        compile_model(model, cuda_graphs=launching.can_capture(start), same_bits=start.world_size > 1)
    if start.world_size > 1 or mesh is not None:
        from .several_ranks import guard

        guard(model, start, training=training, check_inputs=check_inputs)
    if warm_up:
        from ..inference.compiling import warm_up_decoding

        warm_up_decoding(model, warm_up)
    return built


@dataclass(frozen=True)
class _Wanted:
    """The arguments of the caller."""

    path: str
    plan: str | None
    hub: Hub
    trust_remote_code: bool
    dtype: torch.dtype | None
    training: bool
    sequence_parallel: bool
    gather_logits: bool | None
    verify: bool
    dequantize: bool
    all_reduce: str | None
    """Its name, to be compared between the ranks."""
    fuse: bool
    adapter: AdapterDirectories | None

    @property
    def form(self) -> dict[str, bool]:
        """The form, if it is another one than that for plain inference."""
        wanted = {"training": self.training, "sequence_parallel": self.sequence_parallel}
        return wanted if any(wanted.values()) else {}


@dataclass(frozen=True)
class _Checked:
    """A model that passed the checks so far."""

    directory: Path
    manifest: manifest.Manifest
    """Of an ordinary model: one of its small files."""
    plan: Plan
    repository: Repository | None = None
    """Set where this rank's files are still to be downloaded from it."""
    files: rank_files.RankFiles | None = None
    """This rank's files, checked."""
    checkpoint: Mapping[str, LazyTensor] | None = None
    """Instead of files: the global weights of an ordinary model, not read."""
    adapters: AdapterSet | None = None

    @property
    def full_plan(self) -> Plan:
        """Of the model with its adapters."""
        return self.plan if self.adapters is None else self.adapters.plan

    @property
    def model(self) -> tuple[Path, Any, Plan, Repository | None]:
        """What is known of the model before it is built."""
        return self.directory, self.manifest, self.plan, self.repository

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of this rank's files."""
        return () if self.files is None else self.files.paths


def _check(wanted: _Wanted, group: dist.ProcessGroup | None) -> _Checked:
    """The checks that take little time."""
    rank, world_size = launching.rank(group), launching.world_size(group)
    found = _converted(wanted, world_size) if wanted.plan is None else _ordinary(wanted, wanted.plan)
    directory, solved = found.directory, found.plan
    if solved.model.trust_remote_code and not wanted.trust_remote_code:
        raise PlanError(
            f"{directory}: the model runs Python code from its own directory; "
            "read that code, then pass trust_remote_code=True"
        )
    fingerprint.check_code(solved)
    if wanted.adapter is not None:
        from ..adapters.adapter_set import AdapterSet

        adapters = AdapterSet.read(wanted.adapter, solved, lambda: _global(found, wanted))
        found = replace(found, adapters=adapters)
    if wanted.form:
        from .other_forms import require_form

        require_form(found.full_plan, **wanted.form, stays_packed=_stays_packed(solved, wanted))
    if wanted.verify and found.checkpoint is not None:
        raise PlanError("verify=True: an ordinary checkpoint has no checksums; leave it out, or convert")
    if wanted.gather_logits is False and solved.logits is None:
        raise PlanError(f"{directory}: gather_logits=False, but the plan does not shard the logits")
    if found.repository is None and found.checkpoint is None and rank < solved.tp:
        return _with_files(found, rank)
    return found


def _converted(wanted: _Wanted, world_size: int) -> _Checked:
    """A converted directory, local or on the Hub, with its manifest and plan."""
    directory = Path(wanted.path).expanduser()
    if directory.is_dir():
        directory = manifest.variant(directory, world_size)
        found = manifest.read(directory)
        return _Checked(directory, found, manifest.read_plan(directory, found))
    from .from_hub import find_converted

    return _Checked(*find_converted(wanted.path, wanted.hub, world_size))


def _ordinary(wanted: _Wanted, plan: str) -> _Checked:
    """An ordinary model, to be sharded by a plan while it is read."""
    from .by_plan import ordinary

    found = ordinary(wanted.path, plan, wanted.hub, trust_remote_code=wanted.trust_remote_code)
    return _Checked(found.directory, found.manifest, found.plan, checkpoint=found.weights)


def _with_files(found: _Checked, rank: int) -> _Checked:
    """The files of a rank, downloaded if they are missing, and checked."""
    if found.repository is not None:
        found.repository.fetch(found.manifest.files_of(rank))
    return replace(found, files=rank_files.check_files(found.directory, found.manifest, found.plan, rank))


def _stays_packed(plan: Plan, wanted: _Wanted) -> bool:
    """Whether packed parameters are computed with as they are stored."""
    return not wanted.dequantize and any(entry.packing is not None for entry in plan.parameters)


def _connect(
    plan: Plan, wanted: _Wanted, start: Launch, all_reduce: AllReduce | str | None
) -> ProcessCommunicator:
    """The process groups of all collectives that the wanted form of the model issues."""
    if isinstance(all_reduce, str):
        from ..comm.symmetric import connect_by_name

        return connect_by_name(all_reduce, start, lambda function: _connect(plan, wanted, start, function))
    if not wanted.form:
        return launching.connect(plan, start, all_reduce)
    from .other_forms import connect

    return connect(plan, start, all_reduce, **wanted.form)


def _build(checked: _Checked, start: Launch, comm: Communicator, wanted: _Wanted) -> nn.Module:
    plan, directory, adapters = checked.full_plan, checked.directory, checked.adapters
    built = plan if wanted.fuse and not wanted.form else replace(plan, fused=())
    config = read_config(directory, checked.manifest, checked.plan)
    generation_config = read_generation_config(directory, checked.manifest)
    dtype = wanted.dtype or getattr(torch, plan.model.dtype)
    packed = None
    if any(entry.packing is not None for entry in plan.parameters):
        from ..checkpoint.quantized import without_quantization
        from .packed_models import packed_modules

        if not wanted.dequantize:
            packed = packed_modules(directory, plan, config, start.device, comm, dtype)
        config = without_quantization(config)
    try:
        model = build_model(_model_class(directory, plan), config, dtype)
    except Exception as error:
        raise building_failed(directory, error) from error
    attached = None if adapters is None else adapters.attach(model, trainable=wanted.training)
    if wanted.form:
        from ..training.prepare import parallelize_for_training

        parallelize_for_training(model, built, comm, wanted.gather_logits, **wanted.form)
    else:
        parallelize(model, built, comm, wanted.gather_logits, packed)
    if wanted.verify:
        from .file_checksums import verify_checksums

        verify_checksums(directory, checked.manifest, start.rank)
    stored = _stored(checked, checked.plan if adapters is not None else built, start)
    if adapters is not None and attached is not None:
        stored = adapters.tensors(stored, attached, start.rank, start.device)
    rank_files.read(model, built, stored, start, wanted.dtype, packed)
    prepare_generation(model, generation_config, start, wanted.gather_logits is not False)
    remember(model, Loaded(directory.absolute(), checked.manifest, plan, start, packed is not None))
    return (model if attached is None else attached.wrapper).eval()


def _stored(checked: _Checked, plan: Plan, start: Launch) -> Generator[tuple[str, Tensor]]:
    """Local tensors of this rank by name, from its own files or sliced from an ordinary checkpoint."""
    if checked.checkpoint is not None:
        from .by_plan import local_tensors

        return local_tensors(plan, checked.checkpoint, start.rank, start.device)
    assert checked.files is not None
    adjacent: tuple[tuple[str, ...], ...] = ()
    if plan.fused:
        from ..format.fused_groups import adjacent_tensors

        adjacent = adjacent_tensors(plan)
    return rank_files.tensors(checked.files.shards, start.device, adjacent)


def _model_class(directory: Path, plan: Plan) -> type[nn.Module]:
    if not plan.model.trust_remote_code:
        return find_class(plan.model.class_name)
    from .remote_code import remote_class

    return remote_class(directory, plan.model.class_name)


def _launch(
    group: dist.ProcessGroup | None,
    device: torch.device | str | None,
    timeout_s: float | None,
    error: Exception | None,
) -> Launch:
    """Join the others; an error of the directory is raised rather than one of the launch."""
    try:
        return launching.launch(group, device, timeout_s)
    except ShardconvError as failure:
        if error is not None:
            raise error from failure
        raise


def _attempt(stage: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run a stage that may fail on this rank alone; the error is raised once all ranks know of it."""
    try:
        return stage(), None
    except Exception as error:
        return None, error


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise PlanError(f"dtype={dtype!r} is not the name of a torch dtype")
    return found
