"""From the models of all ranks to a converted directory.

    shardconv_runtime.save(model, "trained/")

The directory is what ``shardconv convert`` would write of the model as it is now: it can be loaded, verified,
merged to an ordinary checkpoint, and resharded. Each rank writes what it holds; what data-parallel processes
hold alike, or in shards (``fully_shard``), the first of them writes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm import agreement
from ..errors import CheckpointError, PlanError
from ..format import manifest
from ..format import plan_json as codec
from ..format.layout_hash import holds_values
from ..format.manifest import MANIFEST_NAME, PLAN_NAME, FileEntry, Manifest
from ..format.plan import Plan, parameter_plans
from ..format.shard_files import MAX_FILE_SIZE, PlannedShard, shard_files
from ..format.small_files import copy_small_files, entry_of, plain_config
from ..loaded import Loaded, loaded
from .replicas import Everyone, everyone
from .staging import Staging, begin
from .stored_model import StoredModel, stored_model

TOOLS = ("shardconv", "torch", "transformers", "safetensors")
"""Whose versions the manifest records."""


def save(
    model: nn.Module,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    max_file_size: int = MAX_FILE_SIZE,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Write the model as a converted directory for as many ranks; every process of the model calls it.

    The tensors keep the dtypes that they have now; block-scaled float8 ones, which are in the model's dtype
    since they were loaded, stay in that. Of a model that was not changed the rank files are, byte for byte,
    those that it was loaded from. Of tensors that all ranks hold alike, those of rank 0 are written. Config,
    tokenizer and code are copied from the directory that the model was loaded from.

    ``out`` is there only once it is complete. If anything fails on any process, all raise, and what was in
    its place stays.

    Args:
        model: that ``load`` returned; it may be sharded by ``fully_shard`` over other processes than those it
            was loaded by, wrapped in ``DistributedDataParallel``, or compiled.
        out: directory to make, on a file system that all processes share; it must not exist, or be empty,
            unless ``overwrite``. Its parent must be writable.
        overwrite: replace ``out`` if it is a converted directory, and nothing else.
        max_file_size: bytes of tensors after which a new shard file is begun.
        replicas: the processes that hold the same part of the model as this one, where several groups loaded
            it and neither DTensors nor ``DistributedDataParallel`` say so; the first of them writes.

    Raises:
        ShardconvError: with what is wrong, on which rank, and the remedy.

    Example:
        >>> shardconv_runtime.save(model, "trained/")
        >>> # shardconv merge trained/ plain/
    """
    every = everyone(model, replicas)
    found: StoredModel | None = None
    error: Exception | None = None
    try:
        found = stored_model(model)
    except Exception as failure:
        error = failure
    every.agree(error)
    assert found is not None, "agree has raised the error"
    _require_one_plan(every, found.plan)
    source = loaded(model)
    place = Path(out).expanduser().resolve()
    staging = begin(
        every,
        place,
        overwrite=overwrite,
        contents=converted_files,
        apart_from=source.directory.resolve(),
    )
    try:
        entries, error = _write_shards(found, every, staging.path, max_file_size)
        every.agree(error, agreement.READ_TIMEOUT_S)
        shards = [entry for part in agreement.exchange(every.launch, entries) for entry in part]
        if every.is_leader:
            error = _finish(staging, source, found.plan, shards)
        every.agree(error, agreement.READ_TIMEOUT_S)
    except BaseException:
        if every.is_leader:
            staging.discard()
        raise


def converted_files(directory: Path) -> Collection[str]:
    """The files of a converted directory.

    Raises:
        CheckpointError: it is none.
    """
    return {MANIFEST_NAME, PLAN_NAME, *(entry.path for entry in manifest.read(directory).files)}


def _require_one_plan(every: Everyone, plan: Plan) -> None:
    """The ranks' tensors have the same dtypes, so that one plan speaks of all."""
    dtypes = {name: entry.dtype for name, entry in parameter_plans(plan).items()}
    digests = agreement.exchange(every.launch, codec.sha256(repr((plan.model.dtype, dtypes))))
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise PlanError(
            f"processes 0 and {other} hold parameters in different dtypes; cast the model alike on all ranks"
        )


def _write_shards(
    found: StoredModel, every: Everyone, directory: Path, max_file_size: int
) -> tuple[list[FileEntry], Exception | None]:
    """Write the files of this rank, and on rank 0 what is common.

    A process that cannot write goes on: the others of its rank wait for it where they put together DTensors.

    Returns:
        The files of this process, and what went wrong.
    """
    entries: list[FileEntry] = []
    error: Exception | None = None
    ranks = (None, 0) if every.rank == 0 else (every.rank,)
    for file in shard_files(found.plan, ranks, max_file_size):
        values = _values(found, file, every.rank)
        if every.is_first and error is None:
            try:
                entries.append(_write(directory, file, values))
            except OSError as failure:
                error = CheckpointError(
                    f"{directory / file.path} cannot be written: {failure.strerror or failure}; "
                    "make room or choose another place, then save again"
                )
                error.__cause__ = failure
        for _ in values:
            pass
    return entries, error


def _values(found: StoredModel, file: PlannedShard, rank: int) -> Iterator[Tensor]:
    """What this rank holds of the tensors of a file, one after another, DTensors put together."""
    entries = parameter_plans(found.plan)
    for name in file.layout.offsets:
        tensor = found.tensors[name].detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        yield tensor if holds_values(entries[name], found.plan.mesh, rank) else torch.zeros_like(tensor)


def _write(directory: Path, file: PlannedShard, values: Iterator[Tensor]) -> FileEntry:
    path = directory / file.path
    path.parent.mkdir(exist_ok=True)
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
    return FileEntry(file.path, num_bytes, f"crc32:{crc:08x}", file.rank)


def _bytes(tensor: Tensor) -> Any:
    """The elements of a tensor, in order, as a buffer of bytes."""
    return tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def _finish(staging: Staging, source: Loaded, plan: Plan, shards: list[FileEntry]) -> Exception | None:
    """Write everything else and put the directory in its place; on one process."""
    try:
        _require_seen(staging.path, shards)
        entries = [*shards, *_copy_small_files(source, staging.path)]
        digest = codec.write(plan, staging.path / PLAN_NAME)
        made = Manifest(
            plan.tp,
            digest,
            replace(source.manifest.source, files=()),
            {**source.manifest.tools, **{name: version(name) for name in TOOLS}},
            tuple(sorted(entries, key=lambda entry: entry.path)),
        )
        manifest.write(made, staging.path)
        staging.commit()
    except OSError as failure:
        return CheckpointError(f"{staging.out} cannot be written: {failure.strerror or failure}")
    except Exception as failure:
        return failure
    return None


def _require_seen(directory: Path, shards: list[FileEntry]) -> None:
    for entry in shards:
        path = directory / entry.path
        if not path.is_file() or path.stat().st_size != entry.num_bytes:
            raise CheckpointError(
                f"{path} was written by rank {entry.rank}, and rank 0 does not see it; "
                "save to a file system that all ranks share"
            )


def _copy_small_files(source: Loaded, target: Path) -> list[FileEntry]:
    """Copy what is not weights; a config that speaks of float8 blocks does no more."""
    entries = copy_small_files(source.directory, source.manifest, target)
    if not any(entry.block for entry in source.plan.parameters):
        return entries
    config = target / "config.json"
    config.write_text(plain_config(config.read_text(encoding="utf-8")), encoding="utf-8")
    changed = entry_of(target, Path(config.name))
    return [changed if entry.path == "config.json" else entry for entry in entries]
