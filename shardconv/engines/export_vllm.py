"""Writes a model as the files from which vLLM's ranks start: ``--load-format sharded_state``.

    DIR/model-rank-0-part-0.safetensors     the tensors of rank 0, by vLLM's names
    DIR/model-rank-1-part-0.safetensors
    DIR/config.json, tokenizer ...
    DIR/manifest.json

The installed vLLM determines the names, and the tensors that are fused, padded or repeated: its own loader
runs, and its copies are recorded (``vllm_state``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.format.manifest import MANIFEST_NAME, FileEntry, rank_directory
from shardconv_runtime.format.shard_files import grouped
from shardconv_runtime.format.small_files import config_in_dtype, entry_of
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.parallel.default_modes import in_default_modes
from shardconv_runtime.tensors.lazy_tensor import LazyTensor, item_bytes, numbered
from shardconv_runtime.versions import tool_versions

from ..arguments import MAX_FILE_SIZE, MEMORY, parse_memory, parse_ranks, parse_size, require_tp
from ..converted import derived
from ..reporting.progress import Progress, Silent
from ..writing.durable import write_durably
from ..writing.job import target_file
from ..writing.outputs import Output, WriteOptions
from ..writing.workspace import opened
from . import state_files, vllm_state
from .state_files import signature
from .vllm_calls import require_vllm

if TYPE_CHECKING:
    from ..writing.job import TargetFile
    from ..writing.workspace import Workspace
    from ..writing.writer import Origin
    from .vllm_rank import Declared
    from .vllm_state import EngineState

CONFIG_NAME = "config.json"

_LEAVES_OF_A_RANK = 1 << 32
"""More than any rank computes."""


@dataclass(frozen=True, slots=True)
class EngineSource:
    """A model that is exported."""

    name: str
    directory: Path
    """The directory with its config."""
    tensors: Mapping[str, LazyTensor]
    """The global tensors, by the names of its checkpoint."""
    origin: Origin
    trust_remote_code: bool


@dataclass(frozen=True, slots=True)
class StateExport:
    """The files for vLLM that were written."""

    num_tensors: int
    """Number of tensors of a rank."""
    num_files: int
    """Number of files of weights."""
    rank_bytes: int
    """Bytes of the tensors of the largest rank."""
    dtype: str
    """The dtype to give to vLLM."""
    version: str
    """Version of vLLM."""
    platform: str
    """The platform for which vLLM chose its parameters."""
    is_complete: bool
    """Whether all ranks are written."""


@in_default_modes
def export_vllm(
    model: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    tp: int,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    dtype: str | None = None,
    max_file_size: int | str = MAX_FILE_SIZE,
    memory: int | str = MEMORY,
    ranks: Collection[int] | str | None = None,
    stream: bool | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> StateExport:
    """Write the tensors of each rank of the installed vLLM, without a GPU.

    The model classes and the loader of vLLM run once per rank on tensors without memory. Their copies are
    recorded and then carried out. To continue an interrupted run, call it again with the same arguments.

    Args:
        model: directory or Hub id of an ordinary checkpoint, or a converted directory for any tp.
        directory: directory to create. It must not exist, be empty, or hold the unfinished files of an
            earlier run.
        tp: number of vLLM ranks.
        revision: branch, tag or commit on the Hub.
        cache_dir: directory of the Hub cache.
        local_files_only: use only the Hub cache.
        token: Hub token; by default the token of the Hub login.
        dtype: dtype of the parameters, for example ``"bfloat16"``; by default vLLM chooses.
        max_file_size: maximum size of a file in bytes, or as text such as ``"5GB"``. A larger tensor gets
            its own file.
        memory: I/O buffer size in bytes, or as text.
        ranks: the ranks to write, or text such as ``"0-3,6"``; by default all. The last part completes the
            directory.
        stream: see ``convert``.
        trust_remote_code: import the Python code of the model.
        progress: where to report progress.

    Raises:
        ShardconvError: the message names the problem and the remedy.

    Example:
        >>> shardconv.export_vllm("my-model/", "state/", tp=2)
    """
    require_tp(tp)
    version = require_vllm()
    options = WriteOptions(parse_size(max_file_size), parse_memory(memory), parse_ranks(ranks, tp))
    output = Output.prepare(directory, overwrite=False, source=model, owners=options.owners(tp))
    progress = progress or Silent()

    progress.stage(f"reading {os.fspath(model)}")
    with vllm_state.started() as recorder:
        hub = Hub(revision, cache_dir, local_files_only, token)
        found = _source(model, hub, trust_remote_code, ranks is not None if stream is None else stream)
        own = options.ranks if options.ranks is not None else range(tp)
        progress.stage(f"recording the loader of vLLM {version} for {len(own)} rank{'s' * (len(own) > 1)}")
        state = recorder.recorded_state(
            found.name,
            found.directory,
            found.tensors,
            tp,
            ranks=own,
            dtype=dtype,
            trust_remote_code=found.trust_remote_code,
        )
    files = _target_files(state, options.max_file_size)
    is_complete = _write(found, state, version, files, output, options, progress)
    return StateExport(
        len(state.declared[0]),
        len(files),
        max(sum(_sizes(declared).values()) for declared in state.declared),
        state.dtype,
        version,
        state.platform,
        is_complete,
    )


def file_name(rank: int, part: int) -> str:
    """Return vLLM's name of file ``part`` (from 0) of a rank."""
    return f"model-rank-{rank}-part-{part}.safetensors"


def _source(model: str | os.PathLike[str], hub: Hub, trust_remote_code: bool, stream: bool) -> EngineSource:
    # Imported here, so that the recorder's process starts to import vLLM before this one imports torch.
    from shardconv_runtime.checkpoint.resolve import resolve
    from shardconv_runtime.checkpoint.stored_leaves import lazy_tensors

    from ..converted.saved import checkpoint_tensors
    from ..writing.writer import Origin, origin_of

    path = Path(model).expanduser()
    if (path / MANIFEST_NAME).is_file():
        converted = derived.read(path, trust_remote_code=trust_remote_code)
        tensors, _ = checkpoint_tensors(converted, derived.spec_of(converted))
        origin = Origin(
            converted.manifest.source,
            derived.identity(converted),
            lambda directory: derived.copy_small_files(converted, directory),
        )
        return EngineSource(str(path), path, tensors, origin, converted.plan.model.trust_remote_code)
    spec = resolve(model, hub, trust_remote_code=trust_remote_code, stream=stream)
    assert spec.directory is not None, "a model that was named has one"
    tensors = lazy_tensors(spec.weight_files, spec.index)
    return EngineSource(spec.name, spec.directory, tensors, origin_of(spec), spec.trust_remote_code)


def _target_files(state: EngineState, max_file_size: int) -> list[TargetFile]:
    """Return the files of all ranks."""
    files = []
    tp = len(state.declared)
    for rank, declared in enumerate(state.declared):
        owner = rank_directory(rank, tp)
        metadata = {"format": "pt", "shardconv.rank": str(rank), "shardconv.tp": str(tp)}
        tensors = state.ranks.get(rank, {})  # none of a rank that is not written
        for part, names in enumerate(grouped(_sizes(declared), max_file_size)):
            own = {name: declared[name] for name in names}
            files.append(target_file(file_name(rank, part), owner, own, metadata, tensors.__getitem__))
    return files


def _sizes(declared: Declared) -> dict[str, int]:
    """Return the bytes of tensors by name."""
    return {name: math.prod(shape) * item_bytes(dtype) for name, (dtype, shape) in declared.items()}


def _write(
    found: EngineSource,
    state: EngineState,
    version: str,
    files: list[TargetFile],
    output: Output,
    options: WriteOptions,
    progress: Progress,
) -> bool:
    """Write the files, and return whether the directory is complete."""
    from ..writing.fill import fill
    from ..writing.writer import claim_of, require_unchanged

    source = found.origin.source
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
            # The numbers of leaves in the journals do not depend on the ranks that this run writes: the
            # leaves of the checkpoint come first, and those that a rank computes are its own.
            leaves = numbered(found.tensors.values())
            for rank, tensors in state.ranks.items():
                first = (rank + 1) * _LEAVES_OF_A_RANK
                own = (leaf for leaf in numbered(tensors.values()) if leaf not in leaves)
                leaves |= {leaf: first + index for index, leaf in enumerate(own)}
            fill(workspace, leaves, memory=options.memory, progress=progress)
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
    from ..writing.writer import checksums_of_all

    if workspace.is_finishing:
        workspace.finish_again()
        return True
    checksums = checksums_of_all(workspace, len(state.declared), progress)
    if checksums is None:
        return False
    sizes = {file.path: file.num_bytes for file in workspace.files}
    entries = [FileEntry(path, sizes[path], f"crc32:{crc:08x}") for path, crc in checksums.items()]
    small_files = {entry.path: entry for entry in found.origin.copy_small_files(workspace.path)}
    if CONFIG_NAME not in small_files:
        raise ShardconvError(f"{found.name} has no {CONFIG_NAME}, which vLLM needs")
    config = workspace.path / CONFIG_NAME  # it says the dtype that vLLM is to take
    config.write_text(config_in_dtype(config.read_text(encoding="utf-8"), state.dtype), encoding="utf-8")
    small_files[CONFIG_NAME] = entry_of(workspace.path, Path(CONFIG_NAME))
    entries += small_files.values()
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
