"""Plan and weights to files: what all ranks hold in ``common/``, the rest in a directory for each rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from shardconv_runtime import codec, manifest
from shardconv_runtime.errors import SourceError
from shardconv_runtime.layout_hash import holds_values, is_common, layout_sha256
from shardconv_runtime.manifest import FileEntry, Manifest, Source, sha256_of, shard_metadata, shard_path
from shardconv_runtime.plan import ParameterPlan, Plan, global_shape, local_shape, parameter_plans
from shardconv_runtime.slices import Dim, Mesh, ranges
from torch import Tensor

from .output import fsync_directory
from .progress import Advance, Progress
from .safefile import write_tensors
from .sources import ModelSpec
from .summary import local_bytes

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE*",
)
"""Files of the model directory that go along, as glob patterns."""

COPIED_CODE = ("*.py",)
"""Copied too where the model runs its repository's code."""

TOOLS = ("shardconv", "torch", "transformers", "safetensors")
"""Whose versions the manifest records."""


def write(
    plan: Plan,
    weights: Mapping[str, Tensor],
    directory: Path,
    spec: ModelSpec,
    *,
    max_file_size: int,
    progress: Progress,
) -> None:
    """Fill ``directory``, which is empty, with the converted model; ``manifest.json`` comes last.

    Args:
        plan: how each parameter is laid out.
        weights: global tensors on the CPU, by FQN.
        directory: where to write.
        spec: the model; its small files are copied.
        max_file_size: bytes of tensors after which a new file is begun.
        progress: where to report to.

    Raises:
        SourceError: a weight does not have the shape that the plan says.
    """
    parameters = parameter_plans(plan)
    _require_shapes(parameters, weights)
    files = _copy_small_files(spec, directory)
    owners: list[int | None] = [None, *range(plan.tp)]
    total = sum(_owned_bytes(plan, parameters.values(), owner) for owner in owners)
    layout = layout_sha256(plan)
    with progress.bar("writing", total) as advance:
        for owner in owners:
            shards = _Shards(plan, owner, layout, directory, advance)
            files += shards.write(parameters, weights, max_file_size)
    plan_sha256 = codec.write(plan, directory / manifest.PLAN_NAME)
    source = Source(spec.name if spec.revision else _directory(spec).resolve().name, spec.revision)
    entries = tuple(sorted(files, key=lambda entry: entry.path))
    manifest.write(Manifest(plan.tp, plan_sha256, source, tool_versions(), entries), directory)
    _fsync_tree(directory)


def tool_versions() -> dict[str, str]:
    """Versions of what writes a converted directory."""
    return {name: version(name) for name in TOOLS}


def local_tensor(entry: ParameterPlan, tensor: Tensor, mesh: Mesh, rank: int) -> Tensor:
    """What ``rank`` holds of a parameter.

    Args:
        entry: the parameter's plan.
        tensor: global.
        mesh: of the plan.
        rank: the rank.

    Returns:
        local, contiguous; of a Partial parameter, zeros where a coordinate on its axes is not 0.
    """
    for index, dim in enumerate(entry.dims):
        tensor = _narrow(tensor, index, dim, mesh, rank)
    tensor = tensor.to(getattr(torch, entry.dtype)).contiguous()
    return tensor if holds_values(entry, mesh, rank) else torch.zeros_like(tensor)


def _narrow(tensor: Tensor, index: int, dim: Dim, mesh: Mesh, rank: int) -> Tensor:
    """The positions of one dim that ``rank`` holds, in order."""
    spans = ranges(dim, mesh, rank)
    if spans == ((0, tensor.shape[index]),):
        return tensor
    if not spans:
        return tensor.narrow(index, 0, 0)
    pieces = [tensor.narrow(index, start, stop - start) for start, stop in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, index)


@dataclass(frozen=True, slots=True)
class _Shards:
    """The files of one owner: a rank, or all of them (None)."""

    plan: Plan
    owner: int | None
    layout: str
    """Hash that binds the files to the plan."""
    directory: Path
    advance: Advance

    def write(
        self, parameters: Mapping[str, ParameterPlan], weights: Mapping[str, Tensor], max_file_size: int
    ) -> list[FileEntry]:
        """Write them one by one; of the local tensors no more than one is held at a time."""
        owned = {name: e for name, e in parameters.items() if is_common(e) == (self.owner is None)}
        parts = _split(
            {name: local_bytes(e, self.plan, self._rank) for name, e in owned.items()}, max_file_size
        )
        entries = []
        for index, names in enumerate(parts):
            path = shard_path(self.owner, self.plan.tp, index, len(parts))
            entries.append(self._save(path, {name: owned[name] for name in names}, weights))
        return entries

    @property
    def _rank(self) -> int:
        return self.owner or 0

    def _save(
        self, path: str, entries: Mapping[str, ParameterPlan], weights: Mapping[str, Tensor]
    ) -> FileEntry:
        mesh = self.plan.mesh
        target = self.directory / path
        target.parent.mkdir(exist_ok=True)
        num_bytes, digest = write_tensors(
            target,
            {name: (entry.dtype, local_shape(entry, mesh, self._rank)) for name, entry in entries.items()},
            lambda name: local_tensor(entries[name], weights[name], mesh, self._rank),
            shard_metadata(self.owner, self.plan.tp, self.layout),
            self.advance,
        )
        return FileEntry(path, num_bytes, digest, self.owner)


def _split(num_bytes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Consecutive names that together stay within ``limit`` bytes, or are alone."""
    parts: list[list[str]] = []
    held = 0
    for name, size in num_bytes.items():
        if not parts or held + size > limit:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    return parts


def _require_shapes(parameters: Mapping[str, ParameterPlan], weights: Mapping[str, Tensor]) -> None:
    for name, entry in parameters.items():
        if tuple(weights[name].shape) != global_shape(entry):
            raise SourceError(
                f"{name} is {list(weights[name].shape)} in the checkpoint and {list(global_shape(entry))} "
                "in the plan; plan it again from the config.json that belongs to these weights"
            )


def _owned_bytes(plan: Plan, entries: Iterable[ParameterPlan], owner: int | None) -> int:
    owned = (entry for entry in entries if is_common(entry) == (owner is None))
    return sum(local_bytes(entry, plan, owner or 0) for entry in owned)


def _directory(spec: ModelSpec) -> Path:
    assert spec.directory is not None, "only a model on disk has weights to write"
    return spec.directory


def _copy_small_files(spec: ModelSpec, directory: Path) -> list[FileEntry]:
    root = _directory(spec)
    patterns = COPIED + (COPIED_CODE if spec.trust_remote_code else ())
    found = {file for pattern in patterns for file in root.glob(pattern) if file.is_file()}
    entries = []
    for file in sorted(found):
        path = file.relative_to(root)
        (directory / path).parent.mkdir(exist_ok=True)
        _copy(file, directory / path)
        entries.append(FileEntry(path.as_posix(), file.stat().st_size, sha256_of(directory / path)))
    return entries


def _copy(source: Path, target: Path) -> None:
    """Copy a file durably."""
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer)
        writer.flush()
        os.fsync(writer.fileno())


def _fsync_tree(directory: Path) -> None:
    for path in (*(p for p in directory.rglob("*") if p.is_dir()), directory):
        fsync_directory(path)
