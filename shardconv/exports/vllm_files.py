"""Writes the tensors of vLLM's ranks into the files from which vLLM starts.

``export_vllm`` imports this module when it has started the process that imports vLLM: here torch is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.checkpoint.stored_leaves import lazy_tensors
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.files.manifest import MANIFEST_NAME, FileEntry, rank_directory
from shardconv_runtime.files.object_stores import listed
from shardconv_runtime.files.shard_files import grouped
from shardconv_runtime.files.small_files import config_in_dtype, entry_of
from shardconv_runtime.format.header import item_bytes
from shardconv_runtime.hub_options import Hub, is_url
from shardconv_runtime.versions import tool_versions

from ..converted import derived_directory
from ..converted.file_checks import require_intact
from ..reporting.progress import Progress
from ..writing.durable import write_durably
from ..writing.fill import fill
from ..writing.finished import difference_of_files
from ..writing.job import TargetFile, target_file
from ..writing.outputs import Output, WriteOptions, refuse_other_output
from ..writing.workspace import Workspace, opened
from ..writing.writer import Origin, checksums_of_all, claim_of, origin_of, require_unchanged
from . import state_files
from .saved_layout import checkpoint_tensors
from .state_files import signature
from .vllm_state import Declared, EngineState

CONFIG_NAME = "config.json"


@dataclass(frozen=True, slots=True)
class EngineSource:
    """A model that is exported."""

    name: str
    directory: Path
    """The directory with its config, on this machine."""
    tensors: Mapping[str, LazyTensor]
    """The global tensors, by the names of its checkpoint."""
    origin: Origin
    trust_remote_code: bool
    is_converted: bool
    """Whether it is a converted directory, whose checksums are compared before its bytes are copied."""


def engine_source(
    model: str | os.PathLike[str], hub: Hub, *, trust_remote_code: bool, stream: bool
) -> EngineSource:
    """Find the tensors of an ordinary checkpoint or of a converted directory, without reading them."""
    if is_url(model):
        is_converted = MANIFEST_NAME in listed(os.fspath(model)).objects
    else:
        is_converted = (Path(model).expanduser() / MANIFEST_NAME).is_file()
    if is_converted:
        converted = derived_directory.read(model, trust_remote_code=trust_remote_code)
        tensors, _ = checkpoint_tensors(converted, derived_directory.spec_of(converted))
        origin = Origin(
            converted.manifest.source,
            derived_directory.identity(converted),
            lambda directory: derived_directory.copy_small_files(converted, directory),
        )
        is_trusted = converted.plan.model.trust_remote_code
        name, directory = converted.files.name, converted.directory
        return EngineSource(name, directory, tensors, origin, is_trusted, is_converted=True)
    spec = resolve(model, hub, trust_remote_code=trust_remote_code, stream=stream)
    assert spec.directory is not None, "a model that was named has one"
    tensors = lazy_tensors(spec.weight_files, spec.index)
    origin = origin_of(spec)
    return EngineSource(
        spec.name, spec.directory, tensors, origin, spec.trust_remote_code, is_converted=False
    )


def target_files(state: EngineState, max_file_size: int) -> list[TargetFile]:
    """Return the files of all ranks."""
    files = []
    tp = len(state.declared)
    for rank, declared in enumerate(state.declared):
        owner = rank_directory(rank, tp)
        metadata = {"format": "pt", "shardconv.rank": str(rank), "shardconv.tp": str(tp)}
        tensors = state.ranks.get(rank, {})  # none of a rank that is not written
        for part, names in enumerate(grouped(sizes_of(declared), max_file_size)):
            declared_files = {name: declared[name] for name in names}
            path = f"model-rank-{rank}-part-{part}.safetensors"  # vLLM's name
            files.append(target_file(path, owner, declared_files, metadata, tensors.__getitem__))
    return files


def sizes_of(declared: Declared) -> dict[str, int]:
    """Return the bytes of tensors by name."""
    return {name: math.prod(shape) * item_bytes(dtype) for name, (dtype, shape) in declared.items()}


def write_state(
    found: EngineSource,
    state: EngineState,
    version: str,
    files: list[TargetFile],
    output: Output,
    options: WriteOptions,
    progress: Progress,
) -> bool:
    """Write the files, and return whether the directory is complete."""
    source = found.origin.source
    if output.is_complete:
        # An engine of another version has other tensors in its files, or the same ones.
        signatures = state_files.read(output.path).signatures
        reason = "" if signatures == _signatures(state) else f"other tensors are for vLLM {version}"
        reason = reason or difference_of_files(
            output.present,
            files,
            lambda to: _copy_others(to, found, state),
            options.owners(len(state.declared)),
        )
        refuse_other_output("DST", output.path, reason, "name another directory")
        return True
    job = {
        "source": {"name": source.name, "revision": source.revision, **found.origin.identity},
        "tp": len(state.declared),
        "dtype": state.dtype,
        "max_file_size": options.max_file_size,
        "versions": tool_versions() | {"vllm": version},
        "signatures": list(_signatures(state)),
    }
    claim = claim_of({file.owner for file in files}, options.owners(len(state.declared)))
    with opened(output.path, job, files, claim, tell=progress.stage, check=output.require_free) as workspace:
        if not workspace.is_finishing:
            if found.is_converted:
                require_intact(found.name, progress)
            fill(workspace, memory=options.memory, progress=progress)
            require_unchanged(found.origin)
        with workspace.exclusive():
            return _finish(workspace, found, state, version, progress)


def _signatures(state: EngineState) -> tuple[str, ...]:
    return tuple(
        signature((name, dtype, shape) for name, (dtype, shape) in declared.items())
        for declared in state.declared
    )


def _finish(
    workspace: Workspace, found: EngineSource, state: EngineState, version: str, progress: Progress
) -> bool:
    """Complete the directory if all ranks are written, and return whether they are."""
    if workspace.is_finishing:
        workspace.finish_again()
        return True
    checksums = checksums_of_all(workspace, len(state.declared), progress)
    if checksums is None:
        return False
    sizes = {file.path: file.num_bytes for file in workspace.files}
    entries = [FileEntry(path, sizes[path], checksum) for path, checksum in checksums.items()]
    entries += _copy_others(workspace.path, found, state)
    manifest = state_files.StateManifest(
        tp=len(state.declared),
        engine="vllm",
        engine_version=version,
        platform=state.platform,
        dtype=state.dtype,
        signatures=_signatures(state),
        source=found.origin.source,
        tools=tool_versions(),
        files=tuple(sorted(entries, key=lambda entry: entry.path)),
    )
    write_durably(workspace.path / MANIFEST_NAME, state_files.dumps(manifest))
    workspace.finish([*(entry.path for entry in manifest.files), MANIFEST_NAME], ())
    return True


def _copy_others(directory: Path, found: EngineSource, state: EngineState) -> list[FileEntry]:
    """Copy the files that are not weights, and return their entries in the manifest."""
    small_files = {entry.path: entry for entry in found.origin.copy_small_files(directory)}
    if CONFIG_NAME not in small_files:
        raise ShardconvError(f"{found.name} has no {CONFIG_NAME}, which vLLM needs")
    config = directory / CONFIG_NAME  # it says the dtype that vLLM is to take
    config.write_text(config_in_dtype(config.read_text(encoding="utf-8"), state.dtype), encoding="utf-8")
    small_files[CONFIG_NAME] = entry_of(directory, Path(CONFIG_NAME))
    return list(small_files.values())
