"""Read a converted directory: each rank's tensors, and global tensors assembled from them, all lazy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from shardconv_runtime.checkpoint import lazy_tensor as lazy
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.errors import CheckpointError, DamagedError, PlanError
from shardconv_runtime.files import manifest
from shardconv_runtime.files.converted_files import ConvertedFiles, parts_of
from shardconv_runtime.files.manifest import Manifest
from shardconv_runtime.files.shard_files import check_sample
from shardconv_runtime.format.dims import Dim, axes_of
from shardconv_runtime.format.header import TORCH_NAME, ShardFile
from shardconv_runtime.format.plan import ParameterPlan, Plan, global_shape, local_shape
from shardconv_runtime.format.slices import Mesh, Range, gather_index, group_of
from shardconv_runtime.format.stage_names import held_names
from shardconv_runtime.format.stored_layout import is_common, layout_sha256, stored_plans


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """The positions of a rank's tensor that are used to assemble the global tensor.

    Positions that several ranks hold belong to the part of one of them.
    """

    rank: int
    tensor: LazyTensor
    """Local tensor with these positions, end to end."""
    ranges: Sequence[Sequence[Range]]
    """The global positions of each dim, in order. No range is empty."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A complete converted directory with checked sizes and headers."""

    files: ConvertedFiles
    manifest: Manifest
    plan: Plan
    tensors: Mapping[int | None, Mapping[str, LazyTensor]]
    """Local tensors in the files of each rank, by FQN; tensors in ``common/`` under None."""
    stages: tuple[Manifest, ...] = ()
    """Manifests of the stages, if it was assembled from stages; ``manifest`` is the first one."""

    @property
    def directory(self) -> Path:
        """Return the directory on this machine, which has the small files at least."""
        return self.files.directory

    def weights(self) -> dict[str, LazyTensor]:
        """Return all stored tensors, global: parameters and persistent buffers by FQN, and factors of
        blocks."""
        return {name: self.weight(name, entry) for name, entry in stored_plans(self.plan).items()}

    def parts(self, name: str, entry: ParameterPlan) -> Iterator[OwnedPart]:
        """Yield the parts of a tensor that is not common. Together they cover the global tensor once."""
        owned = [_owned(dim, self.plan.mesh) for dim in entry.dims]
        for cell in product(*(part.items() for part in owned)):
            rank = sum(member for member, _ in cell)  # each member has coordinates only on axes of its dim
            tensor = self.tensors[rank][name]
            for dim, (_, (ranges_of_cell, _)) in enumerate(cell):
                tensor = lazy.take(tensor, dim, ranges_of_cell)
            yield OwnedPart(rank, tensor, [positions for _, (_, positions) in cell])

    def weight(self, name: str, entry: ParameterPlan) -> LazyTensor:
        """Return a stored tensor, global."""
        if is_common(entry):
            return self.tensors[None][name]
        parts = ((part.tensor, part.ranges) for part in self.parts(name, entry))
        return lazy.assemble(entry.dtype, global_shape(entry), parts)


def _owned(dim: Dim, mesh: Mesh) -> dict[int, tuple[list[Range], list[Range]]]:
    """For ranks that differ only on the dim's axes, return the local positions to take and their global
    positions.

    A position that several ranks hold is taken from one of them.
    """
    members = group_of(mesh, axes_of(dim), 0)
    ranges_by_rank: dict[int, tuple[list[Range], list[Range]]] = {}
    done = 0
    for member, start, stop in gather_index(dim, mesh).pieces:
        spans, positions = ranges_by_rank.setdefault(members[member], ([], []))
        spans.append((start, stop))
        positions.append((done, done + stop - start))
        done += stop - start
    return ranges_by_rank


def read(directory: str | os.PathLike[str], *, may_be_damaged: bool = False) -> Converted:
    """Open a converted directory. Stages are assembled to a model without stages."""
    parts = parts_of(directory)
    if len(parts) > 1:
        stages = _stages(directory, parts, may_be_damaged)
        first = stages[0]  # every stage has the model's config and other small files
        tensors: dict[int | None, dict[str, LazyTensor]] = {rank: {} for rank in first.tensors}
        for stage in stages:
            for rank, tensors_of_rank in stage.tensors.items():
                tensors[rank].update(tensors_of_rank)
        manifests = tuple(stage.manifest for stage in stages)
        return Converted(first.files, first.manifest, first.plan, tensors, manifests)
    opened = _read(parts[0], may_be_damaged)
    if opened.plan.stages is not None:
        raise PlanError(
            f"{parts[0].name} is a stage of {opened.plan.stages.count}, with only its own layers; name the "
            "directory that holds all stages"
        )
    return opened


def read_stages(directory: str | os.PathLike[str], *, may_be_damaged: bool = False) -> list[Converted]:
    """Open the directories of all stages: each with the plan of all, tensors by their first names."""
    parts = parts_of(directory)
    if len(parts) == 1:
        return [read(directory, may_be_damaged=may_be_damaged)]
    return _stages(directory, parts, may_be_damaged)


def _stages(
    directory: str | os.PathLike[str], parts: Sequence[ConvertedFiles], may_be_damaged: bool
) -> list[Converted]:
    stages = [_read(part, may_be_damaged) for part in parts]
    plans = {of_all_stages(stage.plan) for stage in stages}
    source = stages[0].manifest.source
    if len(plans) > 1 or any(stage.manifest.source != source for stage in stages):
        raise DamagedError(f"{os.fspath(directory)} has stages of several conversions; convert again")
    plan = plans.pop()
    converted = []
    for number, stage in enumerate(stages):
        firsts = {stored: name for name, stored in held_names(plan, number).items()}
        tensors = {
            rank: {firsts.get(name, name): tensor for name, tensor in stored.items()}
            for rank, stored in stage.tensors.items()
        }
        converted.append(replace(stage, plan=plan, tensors=tensors))
    return converted


def of_all_stages(plan: Plan) -> Plan:
    """Return the plan of a stage's directory as the plan of all stages. Plans without stages do not
    change."""
    return plan if plan.stages is None else replace(plan, stages=replace(plan.stages, own=None))


def _read(files: ConvertedFiles, may_be_damaged: bool) -> Converted:
    """Open one directory, of a model or of a stage."""
    path = files.name
    stored_manifest = manifest.read(files.directory)
    plan = manifest.read_plan(files.directory, stored_manifest)
    if files.objects is not None:
        files.objects.check_sizes(stored_manifest.files)
    else:
        for rank in range(stored_manifest.tp):
            manifest.check_sizes(files.directory, stored_manifest, rank)
    layout = layout_sha256(plan)
    tensors: dict[int | None, dict[str, LazyTensor]] = {None: {}, **{rank: {} for rank in range(plan.tp)}}
    for entry in stored_manifest.files:
        if entry.path.endswith(".safetensors"):
            if entry.sample and not may_be_damaged:
                check_sample(files.file(entry.path), entry.sample)
            file = files.file(entry.path)
            checked = manifest.check_shard(file, entry.rank, stored_manifest.tp, layout)
            shard = ShardFile(file, entry.num_bytes, checked)
            for name, tensor in shard.tensors.items():
                if tensor.dtype not in TORCH_NAME:
                    raise CheckpointError(
                        f"{path}: {entry.path}: {name} has a dtype that torch lacks: {tensor.dtype}"
                    )
                if name in tensors[entry.rank]:
                    raise CheckpointError(f"{path}: {entry.path} has {name}, and so has another file")
                tensors[entry.rank][name] = lazy.stored(shard.path, shard.start, tensor)
    for name, planned in stored_plans(plan).items():
        for owner in (None,) if is_common(planned) else range(plan.tp):
            stored = tensors[owner].get(name)
            expected = (planned.dtype, local_shape(planned, plan.mesh, owner or 0))
            if stored is None or (stored.dtype, stored.shape) != expected:
                description = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
                where = "common/" if owner is None else f"the files of rank {owner}"
                raise DamagedError(
                    f"{path}: {where} should hold {name} as {expected[0]} {list(expected[1])}, "
                    f"and hold {description}; copy the directory again, or convert the model again"
                )
    return Converted(files, stored_manifest, plan, tensors)
