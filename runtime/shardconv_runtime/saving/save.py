"""From the models of all ranks to a converted directory.

    shardconv_runtime.save(model, "trained/")

The directory equals the output of ``shardconv convert`` for the model as it is now: it can be loaded,
verified, merged to an ordinary checkpoint, and resharded. Each rank of the first replica writes its shards;
those that ``fully_shard`` distributes over data-parallel processes are gathered for it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm import agreement
from ..errors import CheckpointError, PlanError
from ..format import manifest, plan_json
from ..format.manifest import MANIFEST_NAME, PLAN_NAME, FileEntry, Manifest
from ..format.plan import Plan, parameter_plans
from ..format.plan_json import of_stage
from ..format.shard_files import MAX_FILE_SIZE, PlannedShard, sample_checksum, shard_files
from ..format.small_files import (
    copy_small_files,
    copy_unused,
    entry_of,
    plain_config,
    stage_directories,
    stage_directory,
)
from ..format.staged_names import held_names, num_stages
from ..format.stored_layout import holds_values
from ..loaded import Loaded, loaded
from ..parallel.default_modes import in_default_modes
from ..versions import tool_versions
from .replicas import Replicas, full_tensor, replicas_of
from .saved_adapters import save_adapters, wrapper_of
from .staging import Staging, staged
from .stored_model import StoredModel, dtypes_of, stored_model, with_dtypes


@in_default_modes
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
    holders = replicas_of(model, replicas)
    found = holders.together(lambda: stored_model(model))
    plan = _common_plan(holders, loaded(model), found)
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
            own = found
            if len(source.stages) > 1:  # the tensors of one stage, by their names in its directory
                here, there = held_names(source.plan, source.stages), held_names(source.plan, stage)
                tensors = {name: found.tensors[here[first]] for first, name in there.items()}
                own = StoredModel(with_dtypes(of_stage(source.plan, stage), dtypes_of(tensors)), tensors)
            entries[stage], failure = _write_shards(own, holders, directory, files)
            error = error or failure
        holders.agree(error, agreement.READ_TIMEOUT_S)
        written = agreement.exchange(holders.launch, entries)
        if holders.is_leader:
            shards = [[e for part in written for e in part.get(s, ())] for s in range(num_stages(plan))]
            error = _finish(staging, source, plan, shards)
        holders.agree(error, agreement.READ_TIMEOUT_S)


def converted_files(directory: Path) -> Collection[str]:
    """Return the files of a converted directory.

    Raises:
        CheckpointError: the directory is not a converted one.
    """
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
    """Return the plan of the whole model with the dtypes of the tensors, which has one for each on all ranks.

    Raises:
        PlanError: some ranks hold a parameter in another dtype; on all of them.
    """
    held = held_names(source.plan, source.stages)
    present = dtypes_of(found.tensors)
    mine = {first: present[name] for first, name in held.items()}
    everyone: Sequence[dict[str, str] | None]
    if source.plan.stages is None:
        digests = agreement.exchange(holders.launch, plan_json.sha256(repr(mine)))
        everyone = [mine if digest == digests[0] else None for digest in digests]
    else:
        everyone = agreement.exchange(holders.launch, mine)
    common: dict[str, str] = {}
    for number, theirs in enumerate(everyone):
        if theirs is None or any(common.setdefault(name, dtype) != dtype for name, dtype in theirs.items()):
            raise PlanError(
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
    crc = zlib.crc32(file.layout.header)
    with path.open("xb") as target:
        target.write(file.layout.header)
        for tensor in values:
            data = _bytes(tensor)
            crc = zlib.crc32(data, crc)
            target.write(data)
        target.flush()
        os.fsync(target.fileno())
        num_bytes = target.tell()
    assert num_bytes == file.layout.num_bytes, "the tensors have the shapes and dtypes of the plan"
    return FileEntry(file.path, num_bytes, f"crc32:{crc:08x}", file.rank, sample_checksum(path))


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
            raise CheckpointError(
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
