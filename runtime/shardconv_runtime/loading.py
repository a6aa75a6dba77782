"""From a converted directory to the model of this rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import agreement, fingerprint, manifest, weights
from . import mesh as launching
from .build import parallelize
from .collectives import AllReduce, Communicator
from .compiling import compile_model
from .errors import CheckpointError, PlanError, ShardconvError
from .forms import of_sequence, require_training
from .generation import prepare_generation
from .lazy import build_model, find_class
from .loaded import Loaded, remember
from .mesh import Launch
from .model_config import building_failed, read_config, read_generation_config
from .plan import Plan
from .read_ahead import ReadAhead

T = TypeVar("T")


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    training: bool = False,
    sequence_parallel: bool = False,
    compile: bool = False,
    gather_logits: bool | None = None,
    timeout_s: float | None = None,
    all_reduce: AllReduce | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load this rank's part of a converted model; every rank of the job calls it.

    The process group is started from torchrun's environment where there is none: nccl on GPUs, gloo on
    the CPU. Whatever is wrong, on whichever rank, every rank raises before the first collective of
    the model. Parameters require gradients only with ``training``.

    ``generate`` gives the same tokens on every rank. It is called alike on all of them, which is checked;
    a ``streamer`` gets tokens on rank 0 only, and rank 0's clock counts for ``max_time``.

    Args:
        path: directory that ``shardconv convert`` wrote.
        device: by default ``cuda:LOCAL_RANK`` if there is cuda, else the CPU.
        dtype: for the floating-point parameters; by default as they are stored.
        group: the processes that load this model, as many as the plan's tp; by default all.
        mesh: instead of ``group``, all processes, of which the dim named "tp" loads a model each: the other
            dims are for data parallelism, see ``data_parallel``.
        training: with the backward collectives of the plan: parameters require gradients as in the unsharded
            model, and their gradients are those of the unsharded model. Call ``train()`` for dropout.
        sequence_parallel: split the activations between the parallel blocks over the sequence; the plan must
            have been made with ``--sequence-parallel``. Lengths that tp does not divide are padded inside.
        compile: run each forward pass as one compiled graph, on GPUs decoding steps as CUDA graphs, and let
            ``generate`` decode from a static cache. ``torch.compile(model)`` works as well.
        gather_logits: if False, each rank keeps its shard of the logits' last dim. The model then
            refuses ``generate`` and, unless it was loaded for training, labels. With ``training``, the loss
            is computed from the shards, and by default no logits are returned in training mode where there
            are labels; True returns them whole.
        timeout_s: how long a rank waits in a collective for the others before it raises, where this call
            starts the process group; by default as torch has it (10 minutes for nccl, 30 for gloo). Also for
            ranks that do not call ``generate`` with the others (5 minutes).
        all_reduce: sums a contiguous tensor over the process group of a name, instead of torch's own; for
            collectives that suit the machine better (symmetric memory, say). It leaves its argument as it
            is; a compiled model needs a function that Dynamo can trace.
        trust_remote_code: allow a model whose code is in ``path`` to run that code.

    Returns:
        The transformers model in eval mode, with the class that it had when converted.

    Raises:
        ShardconvError: with what is wrong, on which rank, and the remedy.

    Example:
        >>> model = shardconv_runtime.load("out/")
        >>> logits = model(input_ids).logits
    """
    wanted = _dtype(dtype)
    if mesh is not None:
        group = launching.tp_group(mesh, group)
    form = _Form(training, sequence_parallel, gather_logits)
    checked, error = _attempt(lambda: _check(Path(path), group, form, trust_remote_code))
    if checked is not None:
        launching.check_world_size(checked.plan, group)
    with ReadAhead(checked.files.paths if checked is not None else ()) as ahead:
        start = _launch(group, device, timeout_s, error)
        agreement.agree(start, error)
        assert checked is not None, "agree has raised the error"
        used = of_sequence(checked.plan) if sequence_parallel else checked.plan
        comm = launching.connect(used, start, all_reduce, training=training)
        model, error = _attempt(lambda: _build(checked, start, comm, wanted, form))
        agreement.agree(start, error, agreement.READ_TIMEOUT_S)
        assert model is not None, "agree has raised the error"
        if start.device.type != "cpu":
            ahead.stop()  # all was read; what is mapped is read while it waits for its first use
    if compile:
        compile_model(model, cuda_graphs=launching.can_capture(start))
    return model


@dataclass(frozen=True)
class _Form:
    """What kind of model is wanted."""

    training: bool
    sequence_parallel: bool
    gather_logits: bool | None


@dataclass(frozen=True)
class _Checked:
    """A directory that this rank can load, as far as sizes and headers tell."""

    directory: Path
    manifest: manifest.Manifest
    plan: Plan
    files: weights.RankFiles


def _check(
    directory: Path, group: dist.ProcessGroup | None, form: _Form, trust_remote_code: bool
) -> _Checked:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: no such directory; give the directory that `shardconv convert` wrote "
            "(this version loads local directories only)"
        )
    found = manifest.read(directory)
    plan = manifest.read_plan(directory, found)
    if plan.model.trust_remote_code and not trust_remote_code:
        raise PlanError(
            f"{directory}: the model runs Python code from its own directory; "
            "read that code, then pass trust_remote_code=True"
        )
    fingerprint.check_code(plan)
    if form.training:
        require_training(plan)
    if form.sequence_parallel:
        of_sequence(plan)
    if form.gather_logits is False and plan.logits is None:
        raise PlanError(f"{directory}: gather_logits=False, but the plan does not shard the logits")
    rank = launching.rank(group)
    files = weights.check_files(directory, found, plan, rank) if rank < plan.tp else weights.RankFiles(())
    return _Checked(directory, found, plan, files)


def _build(
    checked: _Checked, start: Launch, comm: Communicator, dtype: torch.dtype | None, form: _Form
) -> nn.Module:
    plan, directory = checked.plan, checked.directory
    config = read_config(directory, checked.manifest, plan)
    generation_config = read_generation_config(directory, checked.manifest)
    try:
        model = build_model(_model_class(directory, plan), config, dtype or getattr(torch, plan.model.dtype))
    except Exception as error:
        raise building_failed(directory, error) from error
    parallelize(
        model,
        plan,
        comm,
        form.gather_logits,
        training=form.training,
        sequence_parallel=form.sequence_parallel,
    )
    weights.read(model, plan, checked.files, start.device, dtype)
    prepare_generation(model, generation_config, start, form.gather_logits is not False)
    remember(model, Loaded(directory.absolute(), checked.manifest, plan, start))
    return model.eval()


def _model_class(directory: Path, plan: Plan) -> type[nn.Module]:
    if not plan.model.trust_remote_code:
        return find_class(plan.model.class_name)
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = plan.model.class_name.replace(":", ".")
    if "--" in reference:
        raise PlanError(f"{directory}: the model class {reference!r} is code of another repository")
    found: type[nn.Module] = get_class_from_dynamic_module(reference, str(directory), local_files_only=True)
    return found


def _launch(
    group: dist.ProcessGroup | None,
    device: torch.device | str | None,
    timeout_s: float | None,
    error: Exception | None,
) -> Launch:
    """Join the others; what is wrong with the directory goes before what is wrong with the launch."""
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
