"""A converted directory read back: each rank's tensors, and the global ones assembled of them, all lazy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from shardconv_runtime.errors import CheckpointError, PlanError
from shardconv_runtime.format import manifest
from shardconv_runtime.format.dims import Dim, axes_of
from shardconv_runtime.format.header import TORCH_NAME, ShardFile
from shardconv_runtime.format.manifest import FileEntry, Manifest
from shardconv_runtime.format.plan import ParameterPlan, Plan, global_shape, local_shape
from shardconv_runtime.format.shard_files import check_sample
from shardconv_runtime.format.slices import Mesh, Range, gather_index, group_of
from shardconv_runtime.format.small_files import stage_directories
from shardconv_runtime.format.staged_names import held_names
from shardconv_runtime.format.stored_layout import is_common, layout_sha256, stored_plans
from shardconv_runtime.tensors import lazy_tensor as lazy
from shardconv_runtime.tensors.lazy_tensor import LazyTensor


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """The positions of a rank's tensor that the global one is assembled of.

    Positions that several ranks hold belong to the part of one of them.
    """

    rank: int
    tensor: LazyTensor
    """Local: these positions, laid end to end."""
    ranges: Sequence[Sequence[Range]]
    """For each dim, their global positions, in order; no range is empty."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A complete converted directory, its sizes and headers checked."""

    directory: Path
    manifest: Manifest
    plan: Plan
    tensors: Mapping[int | None, Mapping[str, LazyTensor]]
    """Local tensors in the files of each rank, by FQN; those of ``common/`` under None."""
    stages: tuple[Manifest, ...] = ()
    """The manifests of the stages that it was put together of; ``manifest`` is that of the first."""

    def weights(self) -> dict[str, LazyTensor]:
        """All stored tensors, global: parameters and persistent buffers by FQN, and factors of blocks."""
        return {name: self.weight(name, entry) for name, entry in stored_plans(self.plan).items()}

    def parts(self, name: str, entry: ParameterPlan) -> Iterator[OwnedPart]:
        """The parts of a tensor that is not common; together they cover the global one once."""
        owned = [_owned(dim, self.plan.mesh) for dim in entry.dims]
        for cell in product(*(part.items() for part in owned)):
            rank = sum(member for member, _ in cell)  # each has coordinates on axes of its dim only
            tensor = self.tensors[rank][name]
            for dim, (_, (held, _)) in enumerate(cell):
                tensor = lazy.take(tensor, dim, held)
            yield OwnedPart(rank, tensor, [positions for _, (_, positions) in cell])

    def weight(self, name: str, entry: ParameterPlan) -> LazyTensor:
        """A stored tensor, global."""
        if is_common(entry):
            return self.tensors[None][name]
        parts = ((part.tensor, part.ranges) for part in self.parts(name, entry))
        return lazy.assemble(entry.dtype, global_shape(entry), parts)


def _owned(dim: Dim, mesh: Mesh) -> dict[int, tuple[list[Range], list[Range]]]:
    """For ranks that differ on the dim's axes only: local positions to take, and their global positions.

    A position that several ranks hold is taken from one of them.
    """
    members = group_of(mesh, axes_of(dim), 0)
    found: dict[int, tuple[list[Range], list[Range]]] = {}
    done = 0
    for member, start, stop in gather_index(dim, mesh).pieces:
        held, positions = found.setdefault(members[member], ([], []))
        held.append((start, stop))
        positions.append((done, done + stop - start))
        done += stop - start
    return found


def read(directory: str | os.PathLike[str], *, may_be_damaged: bool = False) -> Converted:
    """Open a converted directory; one of several stages is read as a model without.

    Args:
        directory: as ``convert`` writes it.
        may_be_damaged: open files of right headers and sizes whatever bytes they have.

    Raises:
        CheckpointError: if it is not complete, or a file is missing, truncated or another conversion's.
        PlanError: if the plan is malformed, or the directory is that of one stage.
    """
    path = Path(directory)
    if stage_directories(path):
        return _joined(read_stages(path, may_be_damaged=may_be_damaged))
    found = _read(path, may_be_damaged)
    if found.plan.stages is not None:
        raise PlanError(
            f"{path} is a stage of {found.plan.stages.count}, with only its own layers; name the directory "
            "that holds all stages"
        )
    return found


def read_stages(path: Path, *, may_be_damaged: bool = False) -> list[Converted]:
    """Open the directories of all stages, each with the plan of all, and tensors by the first of their names.

    Args:
        path: that holds them; of a model without stages, this one alone is opened.
        may_be_damaged: see ``read``.

    Raises:
        CheckpointError: see ``read``; or they are stages of several conversions.
        PlanError: see ``read``.
    """
    directories = stage_directories(path)
    if not directories:
        return [read(path, may_be_damaged=may_be_damaged)]
    stages = [_read(directory, may_be_damaged) for directory in directories]
    plans = {of_all_stages(stage.plan) for stage in stages}
    source = stages[0].manifest.source
    if len(plans) > 1 or any(stage.manifest.source != source for stage in stages):
        raise CheckpointError(f"{path} has stages of several conversions; convert again")
    plan = plans.pop()
    found = []
    for number, stage in enumerate(stages):
        firsts = {held: name for name, held in held_names(plan, number).items()}
        tensors = {
            rank: {firsts.get(name, name): tensor for name, tensor in held.items()}
            for rank, held in stage.tensors.items()
        }
        found.append(replace(stage, plan=plan, tensors=tensors))
    return found


def _joined(stages: Sequence[Converted]) -> Converted:
    """The stages of a model as one directory, with the config and other small files of the first one."""
    first = stages[0]
    tensors: dict[int | None, dict[str, LazyTensor]] = {rank: {} for rank in first.tensors}
    for stage in stages:
        for rank, held in stage.tensors.items():
            tensors[rank].update(held)
    manifests = tuple(stage.manifest for stage in stages)
    return Converted(first.directory, first.manifest, first.plan, tensors, manifests)


def of_all_stages(plan: Plan) -> Plan:
    """The plan of a stage's directory as one of all of them; without stages, the plan itself."""
    return plan if plan.stages is None else replace(plan, stages=replace(plan.stages, own=None))


def _read(path: Path, may_be_damaged: bool) -> Converted:
    """One directory, of a model or of a stage."""
    found = manifest.read(path)
    plan = manifest.read_plan(path, found)
    for rank in range(found.tp):
        manifest.check_sizes(path, found, rank)
    layout = layout_sha256(plan)
    tensors: dict[int | None, dict[str, LazyTensor]] = {None: {}, **{rank: {} for rank in range(plan.tp)}}
    for entry in found.files:
        if entry.path.endswith(".safetensors"):
            if entry.sample and not may_be_damaged:
                check_sample(manifest.resolve(path, entry.path), entry.sample)
            for name, tensor in _read_file(path, entry, found.tp, layout):
                if name in tensors[entry.rank]:
                    raise CheckpointError(f"{path}: {entry.path} has {name}, and so has another file")
                tensors[entry.rank][name] = tensor
    _require_all(path, plan, tensors)
    return Converted(path, found, plan, tensors)


def _read_file(path: Path, entry: FileEntry, tp: int, layout: str) -> Iterator[tuple[str, LazyTensor]]:
    file = manifest.resolve(path, entry.path)
    shard = ShardFile(file, entry.num_bytes, manifest.check_shard(file, entry.rank, tp, layout))
    for name, tensor in shard.tensors.items():
        if tensor.dtype not in TORCH_NAME:
            raise CheckpointError(
                f"{path}: {entry.path}: {name} has a dtype that torch lacks: {tensor.dtype}"
            )
        yield name, lazy.stored(shard.path, shard.start, shard.tensors[name])


def _require_all(path: Path, plan: Plan, tensors: Mapping[int | None, Mapping[str, LazyTensor]]) -> None:
    for name, entry in stored_plans(plan).items():
        for rank in (None,) if is_common(entry) else range(plan.tp):
            found = tensors[rank].get(name)
            expected = (entry.dtype, local_shape(entry, plan.mesh, rank or 0))
            if found is None or (found.dtype, found.shape) != expected:
                held = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                where = "common/" if rank is None else f"the files of rank {rank}"
                raise CheckpointError(
                    f"{path}: {where} should hold {name} as {expected[0]} {list(expected[1])}, "
                    f"and hold {held}; copy the directory again, or convert the model again"
                )
