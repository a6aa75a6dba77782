"""From the models of all ranks to a converted directory, and with ``save_pretrained`` to an ordinary one.

    shardconv_runtime.save(model, "trained/")

The directory equals the output of ``shardconv convert`` for the model as it is now: it can be loaded,
verified, merged to an ordinary checkpoint, and resharded. Each rank of the first replica writes its shards;
those that ``fully_shard`` distributes over data-parallel processes are gathered for it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm import agreement
from ..comm.rank_0 import without_drawing
from ..default_modes import in_default_modes
from ..errors import CheckpointError, InputsDifferError, MissingFileError, ShardconvError, UnsupportedError
from ..files import manifest
from ..files.checksums import shard_checksum
from ..files.manifest import MANIFEST_NAME, PLAN_NAME, FileEntry, Manifest
from ..files.model_config import CONFIG, GENERATION_CONFIG
from ..files.shard_files import MAX_FILE_SIZE, PlannedShard, sample_checksum, shard_files
from ..files.small_files import (
    copy_small_files,
    copy_unused,
    entry_of,
    plain_config,
    stage_directories,
    stage_directory,
    stages_in,
)
from ..format import plan_json
from ..format.plan import Plan, parameter_plans
from ..format.plan_json import of_stage
from ..format.stage_names import held_names, num_stages
from ..format.stored_layout import holds_values
from ..loaded import Loaded, loaded, remember, unwrapped
from ..versions import converter_function, tool_versions
from .adapter_saving import save_adapters, wrapper_of
from .replicas import Replicas, Staging, full_tensor, mesh_of, replicas_of, staged
from .stored_model import StoredModel, dtypes_of, stored_model, with_dtypes


@in_default_modes
@agreement.named_call("save")
def save(
    model: nn.Module,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    max_file_size: int = MAX_FILE_SIZE,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Write the model as a converted directory for the same number of ranks; call it on every process.

    Tensors are written in their current dtypes. A model that was loaded with ``dequantize=True`` is written
    unquantized. If the model has not changed, the rank files equal the loaded ones byte for byte. Rank 0
    writes replicated tensors. Config, tokenizer and code are copied from the directory that the model was
    loaded from. ``out`` appears only when it is complete. If one process fails, all raise an error, and
    ``out`` does not change.

    Args:
        model: returned by ``load``. It may be sharded by ``fully_shard``, wrapped in
            ``DistributedDataParallel``, or compiled.
        out: directory to create, on a file system that all processes share. It must not exist or must be
            empty, unless ``overwrite`` is set. Its parent must be writable.
        overwrite: replace ``out`` if it is a converted directory without other files.
        max_file_size: size of the tensors in bytes after which a new shard file begins.
        replicas: the processes that hold the same shards as this one. Pass it if several groups loaded the
            model without DTensors and without ``DistributedDataParallel``. The first process writes.

    Raises:
        ShardconvError: the message names the problem, the rank, and the remedy.

    Example:
        >>> shardconv_runtime.save(model, "trained/")
    """
    if loaded(model).attached is not None:
        save_adapters(wrapper_of(model), out, overwrite=overwrite)
        return
    if not (loaded(model).directory / CONFIG).is_file():
        raise UnsupportedError(
            f"{type(model).__name__} is not a model of transformers, so load could not build it from a saved "
            "directory; save model.state_dict() of each rank, for load_state_dict after parallelize"
        )
    holders = replicas_of(model, replicas)
    model_to_store = holders.together(lambda: stored_model(model))
    plan = _common_plan(holders, loaded(model), model_to_store)
    source, target = loaded(model), Path(out).expanduser().resolve()
    apart_from = source.directory.resolve()
    with staged(
        holders, target, overwrite=overwrite, known=converted_files, apart_from=apart_from
    ) as staging:
        ranks = (None, 0) if holders.rank == 0 else (holders.rank,)
        entries: dict[int, list[FileEntry]] = {}
        error: Exception | None = None
        for stage in source.stages:
            directory = _directory(staging.path, plan, stage)
            files = shard_files(_of_stage(plan, stage), ranks, max_file_size)
            stage_model = model_to_store
            if len(source.stages) > 1:  # the tensors of one stage, by their names in its directory
                here, there = held_names(source.plan, source.stages), held_names(source.plan, stage)
                tensors = {name: model_to_store.tensors[here[first]] for first, name in there.items()}
                stage_model = StoredModel(
                    with_dtypes(of_stage(source.plan, stage), dtypes_of(tensors)), tensors
                )
            entries[stage], failure = _write_shards(stage_model, holders, directory, files)
            error = error or failure
        holders.agree(error, agreement.READ_TIMEOUT_S)
        written = agreement.exchange(holders.launch, entries)
        if holders.is_leader:
            shards = [[e for part in written for e in part.get(s, ())] for s in range(num_stages(plan))]
            error = _finish(staging, source, plan, shards)
        holders.agree(error, agreement.READ_TIMEOUT_S)


def converted_files(directory: Path) -> Collection[str]:
    """Return the files of a converted directory."""
    if stages := stage_directories(directory):
        return {f"{stage.name}/{file}" for stage in stages for file in converted_files(stage)}
    return {MANIFEST_NAME, PLAN_NAME, *(entry.path for entry in manifest.read(directory).files)}


def _directory(path: Path, plan: Plan, stage: int) -> Path:
    """Return the directory of a stage, or of a model without any."""
    return path if plan.stages is None else path / stage_directory(stage, plan.stages.count)


def _of_stage(plan: Plan, stage: int) -> Plan:
    """Return the plan that is stored in the directory of a stage."""
    return plan if plan.stages is None else replace(plan, stages=replace(plan.stages, own=stage))


def _common_plan(holders: Replicas, source: Loaded, found: StoredModel) -> Plan:
    """Return the plan of the whole model with the dtypes of the tensors, the same on all ranks."""
    names_in_model = held_names(source.plan, source.stages)
    present = dtypes_of(found.tensors)
    mine = {first: present[name] for first, name in names_in_model.items()}
    everyone: Sequence[dict[str, str] | None]
    if source.plan.stages is None:
        digests = agreement.exchange(holders.launch, plan_json.sha256(repr(mine)))
        everyone = [mine if digest == digests[0] else None for digest in digests]
    else:
        everyone = agreement.exchange(holders.launch, mine)
    common: dict[str, str] = {}
    for number, theirs in enumerate(everyone):
        if theirs is None or any(common.setdefault(name, dtype) != dtype for name, dtype in theirs.items()):
            raise InputsDifferError(
                f"processes 0 and {number} hold parameters in different dtypes; cast the model alike on all "
                "ranks"
            )
    return with_dtypes(source.plan, common)


def _write_shards(
    found: StoredModel, holders: Replicas, directory: Path, files: Iterable[PlannedShard]
) -> tuple[list[FileEntry], Exception | None]:
    """Write the files of this rank, and on rank 0 also the files of replicated tensors.

    A process that cannot write continues, since the other replicas wait for it in all_gathers of DTensors.

    Returns:
        The files that this process wrote, and its error.
    """
    entries: list[FileEntry] = []
    error: Exception | None = None
    for file in files:
        values = _values(found, file, holders.rank)
        if holders.is_first and error is None:
            try:
                entries.append(_write(directory, file, values))
            except ShardconvError as failure:
                error = failure
            except OSError as failure:
                error = CheckpointError(
                    f"{directory / file.path} cannot be written: {failure.strerror or failure}; "
                    "make room or choose another directory, then save again"
                )
                error.__cause__ = failure
        for _ in values:
            pass  # the remaining all_gathers
    return entries, error


def _values(found: StoredModel, file: PlannedShard, rank: int) -> Generator[Tensor]:
    """Yield this rank's local tensors of a file, one after another; one all_gather for each DTensor."""
    entries = parameter_plans(found.plan)
    for name in file.layout.offsets:
        tensor = found.tensors[name].detach()
        if isinstance(tensor, DTensor):
            tensor = full_tensor(tensor)
        yield tensor if holds_values(entries[name], found.plan.mesh, rank) else torch.zeros_like(tensor)


def _write(directory: Path, file: PlannedShard, values: Iterator[Tensor]) -> FileEntry:
    path = directory / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as target:
        target.write(file.layout.header)
        for tensor in values:
            target.write(_bytes(tensor))
        target.flush()
        os.fsync(target.fileno())
        num_bytes = target.tell()
    assert num_bytes == file.layout.num_bytes, "the tensors have the shapes and dtypes of the plan"
    return FileEntry(file.path, num_bytes, shard_checksum(path), file.rank, sample_checksum(path))


def _bytes(tensor: Tensor) -> Any:
    """Return the elements of a tensor, row-major, as a buffer of bytes."""
    return tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def _finish(
    staging: Staging, source: Loaded, plan: Plan, shards: Sequence[list[FileEntry]]
) -> Exception | None:
    """Write the other files, of each stage, and commit the directory, on one process; return the error."""
    try:
        for stage, entries in enumerate(shards):
            _complete(_directory(staging.path, plan, stage), source, _of_stage(plan, stage), entries)
        staging.commit()
    except ShardconvError as failure:
        return failure
    except OSError as failure:
        return CheckpointError(f"{staging.out} cannot be written: {failure.strerror or failure}")
    except Exception as failure:
        return failure
    return None


def _complete(directory: Path, source: Loaded, plan: Plan, shards: list[FileEntry]) -> None:
    """Write the files of a converted directory that are not shards."""
    for entry in shards:
        path = directory / entry.path
        if not path.is_file() or path.stat().st_size != entry.num_bytes:
            raise MissingFileError(
                f"{path} was written by rank {entry.rank} and is not visible to rank 0; "
                "save to a file system that all ranks share"
            )
    entries = [*shards, *_copy_small_files(source, directory)]
    if plan.stages is None or plan.stages.own == 0:
        entries += copy_unused(source.directory, source.manifest, directory)
    digest = plan_json.write(plan, directory / PLAN_NAME)
    made = Manifest(
        plan.tp,
        digest,
        replace(source.manifest.source, files=()),
        {**source.manifest.tools, **tool_versions()},
        tuple(sorted(entries, key=lambda entry: entry.path)),
    )
    manifest.write(made, directory)


def _copy_small_files(source: Loaded, target: Path) -> list[FileEntry]:
    """Copy the files other than weights; the config of a dequantized model loses its quantization."""
    entries = copy_small_files(source.directory, source.manifest, target)
    if not any(entry.packing for entry in source.plan.parameters):
        return entries
    config = target / "config.json"
    config.write_text(plain_config(config.read_text(encoding="utf-8")), encoding="utf-8")
    changed = entry_of(target, Path(config.name))
    return [changed if entry.path == "config.json" else entry for entry in entries]


# ``save_pretrained`` of a loaded model: an ordinary checkpoint of the full model, written by all ranks.
#
# The ranks save a converted directory next to the checkpoint's, which one process merges, tensor by tensor,
# and removes. So no process holds more than its part of the model.


_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
"""Files of an earlier checkpoint, which would be loaded in place of the new ones, or with them."""


@agreement.named_call("save_pretrained")
def save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Any = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = "50GB",
    **other: Any,
) -> None:
    """Write the full model as transformers' method of this name does; every process of the model calls it.

    ``save_directory`` may exist; files of other names stay, and ``config.json`` is written last. It needs
    room for the model twice, on a file system that all processes share.
    """
    source = loaded(model)
    target = Path(save_directory).expanduser().resolve()
    is_whole = source.plan.tp == 1 and source.plan.stages is None
    if is_whole and not source.packed and mesh_of(model) is None:
        if (unfit := _unfit(target)) is not None:
            raise unfit
        arguments = {"state_dict": state_dict, "push_to_hub": push_to_hub, "max_shard_size": max_shard_size}
        type(model).save_pretrained(model, save_directory, is_main_process, **arguments, **other)  # type: ignore[attr-defined]
        _note_new_files(model, target)
        return
    _check_options(model, state_dict=state_dict, push_to_hub=push_to_hub, **other)
    sharded = _beside(target, "sharded")
    holders = replicas_of(model)
    remedy = ", or call shardconv_runtime.save and run `shardconv export --format hf` elsewhere"
    purpose = "save_pretrained merges the shards of all ranks"
    merge = holders.together(lambda: converter_function("merge", purpose, remedy))
    holders.agree(_unfit(target))
    save(model, sharded, overwrite=True)
    error = None
    if holders.is_leader:
        error = _merge(merge, model, sharded, target, max_shard_size)
    holders.agree(error, agreement.READ_TIMEOUT_S)
    _note_new_files(model, target)


def _note_new_files(model: nn.Module, target: Path) -> None:
    """If the model was loaded from the target, record the new files other than weights in its manifest."""
    source = loaded(model)
    if target == source.directory.resolve():
        files = tuple(entry_of(target, Path(entry.path)) for entry in source.manifest.files)
        remember(unwrapped(model), replace(source, manifest=replace(source.manifest, files=files)))


def _check_options(model: nn.Module, **options: Any) -> None:
    allowed = {"save_peft_format": (True,), "save_original_format": (True,), "token": (options.get("token"),)}
    for name, value in options.items():
        if value is None or value is False or any(value is one for one in allowed.get(name, ())):
            continue
        remedy = (
            "shardconv export --format hf"
            if name != "push_to_hub"
            else "the hf command uploads the directory"
        )
        raise UnsupportedError(
            f"save_pretrained({name}=...) is not supported for a {type(model).__name__} whose parameters are "
            f"sharded over ranks; leave it out ({remedy}), or use shardconv_runtime.save"
        )


def _unfit(target: Path) -> Exception | None:
    if target.exists() and not target.is_dir():
        return CheckpointError(f"{target} is a file; name a directory")
    if all((target / name).is_file() for name in (MANIFEST_NAME, PLAN_NAME)) or stages_in(target):
        return CheckpointError(
            f"{target} is a converted directory, from which load would take its shards as before; name "
            "another directory, or use shardconv_runtime.save"
        )
    return None


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}")


def _merge(
    merge: Callable[..., object], model: nn.Module, sharded: Path, target: Path, max_shard_size: int | str
) -> Exception | None:
    """Merge the converted directory into ``target``, and remove it; return the error, if any."""
    merged, plan = _beside(target, "merged"), loaded(model).plan
    try:
        shutil.rmtree(merged, ignore_errors=True)
        trust = plan.model.trust_remote_code
        with without_drawing():
            merge(sharded, merged, max_file_size=max_shard_size, trust_remote_code=trust)
        _write_configs(unwrapped(model), plan.model.class_name.rpartition(":")[2], merged)
        # Move all files of ``merged`` to ``target``: the config, without which nothing loads it, last.
        target.mkdir(parents=True, exist_ok=True)
        (target / CONFIG).unlink(missing_ok=True)
        for pattern in _WEIGHTS:
            for file in target.glob(pattern):
                file.unlink()
        files = sorted(file.relative_to(merged) for file in merged.rglob("*") if file.is_file())
        for file in sorted(files, key=lambda file: file.name == CONFIG):
            (target / file).parent.mkdir(exist_ok=True)
            (merged / file).replace(target / file)
    except ShardconvError as failure:
        return failure
    except OSError as failure:
        return CheckpointError(f"{target} cannot be written: {failure.strerror or failure}")
    except Exception as failure:
        return failure
    finally:
        for made in (sharded, merged):
            shutil.rmtree(made, ignore_errors=True)
    return None


def _write_configs(model: Any, class_name: str, directory: Path) -> None:
    """Write the configs of the model as they are now, with the dtype of the weights in ``directory``."""
    path = directory / CONFIG
    config = copy.deepcopy(model.config)
    # A model that was made in memory may have a config without a dtype; a checkpoint needs it.
    config.dtype = json.loads(path.read_text(encoding="utf-8")).get("dtype") or config.dtype or model.dtype
    config.architectures = [class_name]
    config.save_pretrained(directory)
    path.write_text(plain_config(path.read_text(encoding="utf-8")), encoding="utf-8")
    if getattr(model, "generation_config", None) is not None:
        try:
            model.generation_config.save_pretrained(directory)
        except ValueError:  # settings that contradict each other, with which the model was loaded
            model.generation_config.to_json_file(directory / GENERATION_CONFIG)
