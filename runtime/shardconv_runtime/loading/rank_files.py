"""One rank's files: checked before anything is built, then read into the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..files.checksums import checksums
from ..files.manifest import (
    COMMON_DIRECTORY,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    check_shard,
    check_sizes,
    is_intact,
    resolve,
    sha256_checksum,
)
from ..files.model_config import CONFIG, GENERATION_CONFIG
from ..files.object_stores import ObjectDirectory
from ..files.shard_files import check_sample
from ..format.header import STORED_NAME, ShardFile, StoredTensor
from ..format.plan import Plan, local_shape, parameter_plans
from ..format.stored_layout import is_common, layout_sha256, stored_plans
from ..parallel.build import retie, stored_tensors
from ..parallel.fused_products import refresh_fused
from ..parallel.row_ids import VocabularyRows
from ..storage.file_access import WeightFile, is_local
from ..storage.pinned_reading import Cuda, staged
from ..storage.reading import REMEDY, Adjacent, Span, mapped
from ..storage.remote_shards import fetched
from .transform import RankModel, Tensors


def verify_checksums(
    directory: Path, manifest: Manifest, rank: int, objects: ObjectDirectory | None = None
) -> None:
    """Read all files of a rank, ``common/`` included, and compare their checksums and the manifest's own."""
    if not is_intact((directory / MANIFEST_NAME).read_text(encoding="utf-8")):
        raise CheckpointError(
            f"{directory}: {MANIFEST_NAME} is not the file that was written; copy it again, or convert again"
        )
    paths = {entry: _file(directory, entry, objects) for entry in manifest.files_of(rank)}
    for entry, checksum in checksums(paths).items():
        if isinstance(checksum, CheckpointError):
            raise CheckpointError(f"{paths[entry]}: {checksum}") from checksum
        if checksum != entry.checksum:
            raise CheckpointError(
                f"{directory}: {entry.path} is damaged, or is not the file that was written: its checksum is "
                f"{checksum}, and {entry.checksum} in the manifest; copy it again, or convert the model again"
            )


def _file(directory: Path, entry: FileEntry, objects: ObjectDirectory | None) -> WeightFile:
    """Return a file of a converted directory, of which an object store may hold the shards."""
    if objects is not None and entry.path.endswith(".safetensors"):
        return objects.objects[entry.path]
    return resolve(directory, entry.path)


@dataclass(frozen=True)
class RankFiles:
    """The safetensors files of one rank, ``common/`` included, whose headers agree with the plan."""

    shards: tuple[ShardFile, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return all byte ranges of the files on this machine, in the order in which they are read."""
        return tuple((shard.path, 0, shard.num_bytes) for shard in self.local)

    @property
    def local(self) -> tuple[ShardFile, ...]:
        """Return the files on this machine."""
        return tuple(shard for shard in self.shards if is_local(shard.path))


def check_files(
    directory: Path, manifest: Manifest, plan: Plan, rank: int, objects: ObjectDirectory | None = None
) -> RankFiles:
    """Check, from only sizes and headers, that ``rank`` will find each of its tensors exactly once.

    The config and the model's own code are checked byte by byte.

    Args:
        objects: the object store that holds the shards, if they are not in ``directory``.
    """
    if objects is None:
        check_sizes(directory, manifest, rank)
    else:
        objects.check_sizes(tuple(manifest.files_of(rank)))
    for entry in manifest.files_of(rank):
        decides = entry.path in (CONFIG, GENERATION_CONFIG) or entry.path.endswith(".py")
        if decides and sha256_checksum(resolve(directory, entry.path)) != entry.checksum:
            raise CheckpointError(
                f"{directory}: {entry.path} is not the one that was converted (its sha256 is not that in "
                f"{MANIFEST_NAME}); {REMEDY}"
            )
    layout = layout_sha256(plan)
    tensors_by_name: dict[str, tuple[StoredTensor, FileEntry]] = {}
    shards = []
    for entry in manifest.files_of(rank):
        in_shards = entry.rank is not None or entry.path.startswith(f"{COMMON_DIRECTORY}/")
        if not in_shards or not entry.path.endswith(".safetensors"):
            continue
        path = _file(directory, entry, objects)
        shards.append(ShardFile(path, entry.num_bytes, check_shard(path, entry.rank, plan.tp, layout)))
        if entry.sample:
            check_sample(path, entry.sample)
        for name, tensor in shards[-1].tensors.items():
            if name in tensors_by_name:
                raise CheckpointError(
                    f"{directory}: {name} is in {tensors_by_name[name][1].path} and in {entry.path}; {REMEDY}"
                )
            tensors_by_name[name] = (tensor, entry)
    _compare(directory, tensors_by_name, plan, rank)
    return RankFiles(tuple(shards))


def tensors(shards: Sequence[ShardFile], device: torch.device, adjacent: Adjacent = ()) -> Tensors:
    """Yield names and local tensors of the files, of stored shapes and dtypes, on the device, in file order.

    Tensors of ``adjacent`` share memory if they are next to each other in the file. Close the iterator, or
    run it to its end: until then threads may be reading, and the device copying.
    """
    if device.type == "cuda" and hasattr(os, "preadv"):
        yield from staged(shards, Cuda(device), adjacent)
        return
    is_remote = not all(is_local(shard.path) for shard in shards)
    for name, tensor in (fetched if is_remote else mapped)(shards, adjacent):
        yield name, tensor.to(device)


def fill(rank: RankModel, tensors: Tensors) -> None:
    """Fill a model of local shapes, in place, and move buffers that are in no file to the device.

    Args:
        tensors: local tensors on the device; closed in any case.
    """
    model, plan = rank.model, rank.held_plan
    todo = set(parameter_plans(plan)) - (rank.packed.names if rank.packed is not None else set())
    modules = dict(model.named_modules(remove_duplicate=False))
    with closing(tensors):
        for name, tensor in tensors:
            owner, _, attribute = name.rpartition(".")
            tensor = tensor.to(rank.dtypes.get(name, tensor.dtype))
            # Assigned to the dicts, since `register_parameter` and `setattr` run hooks that refuse changes.
            replaced = modules[owner]._parameters.get(attribute)
            if replaced is not None:
                kind = VocabularyRows if isinstance(replaced, VocabularyRows) else nn.Parameter
                filled = kind(tensor, requires_grad=replaced.requires_grad)
                modules[owner]._parameters[attribute] = filled
            else:
                modules[owner]._buffers[attribute] = tensor
            todo.remove(name)
    if todo:
        raise CheckpointError(f"no file had {min(todo)}; {REMEDY}")
    retie(model, plan)
    if plan.fused:
        refresh_fused(model)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(rank.start.device)


def require_filled(model: nn.Module) -> None:
    """Check that no tensor of the model is on meta."""
    if empty := [name for name, tensor in stored_tensors(model) if tensor.is_meta]:
        raise CheckpointError(f"no file had {empty[0]}; {REMEDY}")


def mark_loaded(model: nn.Module) -> None:
    """Mark the weights as loaded, as ``from_pretrained`` does.

    Otherwise transformers draws them anew in ``post_init`` of the model, or of one around it.
    """
    marked: Any
    for marked in (*model.modules(), *model.parameters(), *model.buffers()):
        marked._is_hf_initialized = True


def _compare(
    directory: Path, found: dict[str, tuple[StoredTensor, FileEntry]], plan: Plan, rank: int
) -> None:
    """Compare the names, shapes and dtypes of the stored tensors with the plan."""
    expected = stored_plans(plan)
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(
            f"{directory}: {len(missing)} tensor(s) of rank {rank} are missing, e.g. {missing[0]}; {REMEDY}"
        )
    if extra := sorted(found.keys() - expected.keys()):
        raise CheckpointError(
            f"{directory}: {found[extra[0]][1].path} has {extra[0]}, which is not in the plan; {REMEDY}"
        )
    for name, entry in expected.items():
        tensor, file = found[name]
        shape, problem = local_shape(entry, plan.mesh, rank), ""
        if tensor.shape != shape:
            problem = f"has shape {tensor.shape}, but {shape} on rank {rank} by the plan"
        elif tensor.dtype != STORED_NAME[entry.dtype]:
            problem = f"has dtype {tensor.dtype}, but {entry.dtype} by the plan"
        elif is_common(entry) != (file.rank is None):
            problem = "is in the wrong file: common/ is for the tensors that are replicated over all ranks"
        if problem:
            raise CheckpointError(f"{directory}: {file.path}: {name} {problem}; {REMEDY}")
