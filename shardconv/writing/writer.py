"""Writes a plan and weights to files: replicated tensors to ``common/``, shards to a directory for each
rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.checkpoint.packed_plan import as_planned, shard
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import SourceError
from shardconv_runtime.files import manifest
from shardconv_runtime.files.manifest import (
    COMMON_DIRECTORY,
    MANIFEST_NAME,
    PLAN_NAME,
    UNUSED_NAME,
    FileEntry,
    Manifest,
    Source,
    SourceFile,
    rank_directory,
)
from shardconv_runtime.files.shard_files import PlannedShard, shard_files
from shardconv_runtime.files.small_files import EXAMPLE_NAME, entry_of, files_to_copy, plain_config
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.format.stored_layout import stored_plans, tensor_name
from shardconv_runtime.hub_options import is_url
from shardconv_runtime.storage.file_access import WeightFile, identity, known_sha256, name_in, num_bytes
from shardconv_runtime.versions import tool_versions

from ..arguments import ExampleInputs
from ..inputs.example_inputs import save_example
from ..reporting.progress import Progress
from .durable import write_durably
from .fill import fill
from .finished import difference_of_files
from .job import TargetFile, difference, target_file
from .outputs import AnyOutput, WriteOptions, refuse_other_output, settings_of
from .store_workspace import StoredWorkspace
from .workspace import Claim, Workspace

AnyWorkspace = Workspace | StoredWorkspace


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of the weights, for all files that are written next to them."""

    source: Source
    """The source that the manifest names."""
    identity: Mapping[str, object]
    """JSON that changes whenever the weights do; a run continues one of the same identity."""
    copy_small_files: Callable[[Path], list[FileEntry]]
    """Copies the files that are not weights to a directory."""
    identify: Callable[[], Mapping[str, object]] | None = None
    """Computes the identity again; None: it cannot change."""
    unused: Mapping[str, LazyTensor] = field(default_factory=dict)
    """Tensors that the model does not use, and that are written next to its own."""
    copy_unused: Callable[[Path], list[FileEntry]] = lambda directory: []
    """Copies a file of such tensors, if the source has one."""
    errors: Callable[[], Mapping[str, float]] = dict
    """Returns the errors of quantized weights that are known so far, by FQN, see ``Manifest``."""


def origin_of(spec: ModelSpec) -> Origin:
    """Return the origin of a model on disk in its current state; to be called before its weights are read."""

    def identify() -> dict[str, object]:
        files: list[WeightFile] = list(spec.weight_files)
        if spec.index is not None:
            files.append(spec.index.path)  # it says which of two files counts
        return {"files": {name_in(_directory(spec), file): identity(file) for file in files}}

    return Origin(source_of(spec), identify(), lambda directory: copy_small_files(spec, directory), identify)


def with_example(origin: Origin, example: ExampleInputs, config: Any) -> Origin:
    """Return the origin with the example inputs of a user, which replace those that the source has."""

    def copy(directory: Path) -> list[FileEntry]:
        entries = [entry for entry in origin.copy_small_files(directory) if entry.path != EXAMPLE_NAME]
        return [*entries, entry_of(directory, save_example(example, config, directory))]

    return replace(origin, copy_small_files=copy)


def write(
    plan: Plan,
    weights: Mapping[str, LazyTensor],
    output: AnyOutput,
    origin: Origin,
    options: WriteOptions,
    progress: Progress,
) -> bool:
    """Write the converted model, or some ranks of it, and return whether the directory is complete."""
    parameters = stored_plans(plan)
    weights = {name: as_planned(name, entry, weights[name]) for name, entry in parameters.items()}
    owners = {
        stored: name
        for name, entry in parameter_plans(plan).items()
        if entry.packing is not None
        for stored in (tensor_name(name, tensor.name) for tensor in entry.packing.tensors)
    }

    def target(file: PlannedShard) -> TargetFile:
        def tensor(name: str) -> LazyTensor:
            return shard(parameters[name], weights[name], plan.mesh, file.rank or 0)

        def measured() -> dict[str, float]:
            errors, written = (
                origin.errors(),
                {owners[name] for name in file.layout.offsets if name in owners},
            )
            return {name: errors[name] for name in sorted(written & errors.keys())}

        return TargetFile(file.path, file.path.split("/")[0], file.layout, tensor, measured)

    files = [target(file) for file in shard_files(plan, (None, *range(plan.tp)), options.max_file_size)]
    unused = origin.unused if plan.stages is None or plan.stages.own == 0 else {}
    if unused:
        declared = {name: (tensor.dtype, tensor.shape) for name, tensor in sorted(unused.items())}
        metadata = {"format": "pt"}
        files.append(target_file(UNUSED_NAME, COMMON_DIRECTORY, declared, metadata, unused.__getitem__))
    # Everything that must be equal for a run to continue an earlier one.
    job: dict[str, object] = {
        "source": {"name": origin.source.name, "revision": origin.source.revision, **origin.identity},
        "tp": plan.tp,
        "dtype": plan.model.dtype,
        "experts": plan.experts,
        "max_file_size": options.max_file_size,
        "versions": tool_versions(),
        "plan": plan_json.sha256(plan_json.dumps(plan)),
    }
    if unused:
        job["unused"] = sorted(unused)
    if output.is_complete:
        _require_same(plan, origin, output, files)
        return True
    claim = claim_of({file.owner for file in files}, options.owners(plan.tp))
    with output.opened(job, files, claim, tell=progress.stage) as workspace:
        if not workspace.is_finishing:
            fill(workspace, memory=options.memory, progress=progress)
            require_unchanged(origin)
        with workspace.exclusive():
            return _finish(workspace, plan, origin, output, progress)


def _require_same(plan: Plan, origin: Origin, output: AnyOutput, files: Sequence[TargetFile]) -> None:
    """Raise ``ShardconvError`` unless this run would write the output that an earlier one has completed."""
    written = manifest.read(output.present.directory)
    old, source = manifest.read_plan(output.present.directory, written), written.source
    before, now = (
        {
            "source": {"name": origin.name, "revision": origin.revision, "files": list(origin.files)},
            **settings_of(each),
            "versions": {"torch": each.code.torch, "transformers": each.code.transformers},
            "plan": plan_json.sha256(plan_json.dumps(each)),
        }
        for origin, each in ((source, old), (origin.source, plan))
    )
    reason = "" if before == now else difference(before, now)
    reason = reason or difference_of_files(output.present, files, origin.copy_small_files)
    refuse_other_output("DST", output.name, reason)


def claim_of(owners: set[str], wanted: set[str] | None) -> Claim:
    """Return the claim of the wanted owners; the common part is written by any process that is free to."""
    required = owners if wanted is None else owners & wanted
    return Claim(required, (owners & {COMMON_DIRECTORY}) - required)


def require_unchanged(origin: Origin) -> None:
    """Require that the source did not change while it was read."""
    identity = origin.identity if origin.identify is None else origin.identify()
    if identity != origin.identity:
        raise SourceError(
            f"{origin.source.name} changed while it was read ({difference(origin.identity, identity)}); "
            "run the same command again, which starts over"
        )


def source_of(spec: ModelSpec) -> Source:
    """Return the source that the manifest names for a model."""
    is_here = spec.revision is None and not is_url(spec.name)
    name = _directory(spec).resolve().name if is_here else spec.name
    files = tuple(
        SourceFile(name_in(_directory(spec), f), num_bytes(f), known_sha256(f)) for f in spec.weight_files
    )
    return Source(name, spec.revision, tuple(sorted(files, key=lambda file: file.path)))


def _finish(
    workspace: AnyWorkspace, plan: Plan, origin: Origin, output: AnyOutput, progress: Progress
) -> bool:
    """Complete the directory if all owners are finished, and return whether they are."""
    if workspace.is_finishing:
        workspace.finish_again()
        return True
    checksums = checksums_of_all(workspace, plan.tp, progress)
    if checksums is None:
        return False
    ranks = {rank_directory(rank, plan.tp): rank for rank in range(plan.tp)}
    entries = [workspace.entry(file, checksums[file.path], ranks.get(file.owner)) for file in workspace.files]
    entries += origin.copy_small_files(workspace.path)
    if plan.stages is None or plan.stages.own == 0:
        entries += origin.copy_unused(workspace.path)
    complete(workspace, plan, origin.source, entries, output)
    return True


def checksums_of_all(workspace: AnyWorkspace, tp: int, progress: Progress) -> dict[str, str] | None:
    """Return the checksum of each file by path; None, and report it, while others still write some."""
    checksums = workspace.checksums()
    if checksums is None:
        rest = listed_owners(workspace.unfinished(), tp)
        progress.stage(f"this part is finished; others still have to write {rest}")
    return checksums


def complete(
    workspace: AnyWorkspace,
    plan: Plan,
    source: Source,
    entries: Iterable[FileEntry],
    output: AnyOutput,
) -> None:
    """Write plan and manifest, and move all files to OUT."""
    ordered = tuple(sorted(entries, key=lambda entry: entry.path))
    plan_sha256 = plan_json.write(plan, workspace.path / PLAN_NAME)
    errors = workspace.measured() or None
    document = Manifest(plan.tp, plan_sha256, source, tool_versions(), ordered, quantization_errors=errors)
    write_durably(workspace.path / MANIFEST_NAME, manifest.dumps(document))
    paths = [*(entry.path for entry in ordered), PLAN_NAME, MANIFEST_NAME]
    workspace.finish(paths, output.replaced())


def listed_owners(owners: Collection[str], tp: int) -> str:
    """Return owners as text, such as ``ranks 0-2, 4-63``."""
    ranks = [rank for rank in range(tp) if rank_directory(rank, tp) in owners]
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    named = [f"rank{'s' if len(ranks) > 1 else ''} {shown}"] if ranks else []
    return " and ".join(named + [COMMON_DIRECTORY] * (COMMON_DIRECTORY in owners))


def _directory(spec: ModelSpec) -> Path:
    assert spec.directory is not None, "only a model on disk has weights to write"
    return spec.directory


def copy_small_files(spec: ModelSpec, directory: Path) -> list[FileEntry]:
    """Copy the files of the model that are not weights, and return their entries in the manifest."""
    root = _directory(spec)
    entries = []
    for path in files_to_copy(root, code=spec.trust_remote_code):
        file = root / path
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        if spec.dequantize and path == Path("config.json"):
            config = plain_config(file.read_text(encoding="utf-8"))
            (directory / path).write_text(config, encoding="utf-8")
        else:
            shutil.copyfile(file, directory / path)
        entries.append(entry_of(directory, path))
    return entries
