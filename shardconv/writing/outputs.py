"""The directories that a conversion writes: one, or one for each stage of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Union

from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.errors import (
    CheckpointError,
    DamagedError,
    OptionError,
    OutputExistsError,
    ShardconvError,
)
from shardconv_runtime.files.converted_files import ConvertedFiles
from shardconv_runtime.files.manifest import (
    MANIFEST_NAME,
    PARTIAL,
    PLAN_NAME,
    check_size,
    rank_directory,
    read_plan,
)
from shardconv_runtime.files.manifest import read as read_manifest
from shardconv_runtime.files.small_files import stage_directory
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.stage_names import held_by, num_stages
from shardconv_runtime.hub_options import is_url

from .job import Job, TargetFile, difference, is_placed, known_files, read_state
from .workspace import Claim, Workspace, opened, refuse_if_busy

if TYPE_CHECKING:  # it imports the client of the Hub
    from .store_output import StoredOutput

OTHER_REMEDY = "name another directory, or pass --overwrite"


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How much of a converted directory is written, and with which buffers."""

    max_file_size: int
    """Bytes of tensors after which a new file is begun."""
    memory: int
    """I/O buffer size in bytes."""
    ranks: Collection[int] | None = None
    """The ranks to write, of stages counted through; None: all."""

    def of_stage(self, stage: int, tp: int) -> WriteOptions | None:
        """Return the options of a stage of ``tp`` ranks; None if none of its ranks are written."""
        if self.ranks is None:
            return self
        local_ranks = [rank - stage * tp for rank in self.ranks if rank // tp == stage]
        return replace(self, ranks=local_ranks) if local_ranks else None

    def owners(self, tp: int) -> set[str] | None:
        """Return the directories of the ranks to write; None: all."""
        return None if self.ranks is None else {rank_directory(rank, tp) for rank in self.ranks}


@dataclass(frozen=True, slots=True)
class Output:
    """A directory that may be written, and that never replaces anything that shardconv did not write."""

    path: Path
    overwrite: bool
    """Whether a converted directory may be replaced."""
    is_complete: bool = False
    """Whether an earlier run has completed it. This run then only compares it with its own files."""

    @property
    def name(self) -> str:
        """Return its name in messages."""
        return str(self.path)

    @property
    def present(self) -> ConvertedFiles:
        """Return the files of an output that is complete."""
        return ConvertedFiles(self.path)

    def opened(
        self, job: Job, files: Sequence[TargetFile], claim: Claim, tell: Callable[[str], None]
    ) -> AbstractContextManager[Workspace]:
        """Lock owners, and continue the job that was begun, or begin."""
        return opened(self.path, job, files, claim, tell=tell, check=self.require_free)

    @classmethod
    def prepare(
        cls,
        out: str | os.PathLike[str],
        *,
        overwrite: bool,
        source: str | os.PathLike[str],
        owners: Collection[str] | None = None,
    ) -> Output:
        """Check that ``out`` may be written, without creating it, or that it is complete already."""
        path = Path(out).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise OutputExistsError(f"DST {out} is a file; name a directory that does not exist yet")
        if path.is_dir() and any(file.name != PARTIAL for file in path.iterdir()):
            _require_apart(path, Path(source).expanduser())
            if not overwrite and not _is_being_finished(path):
                if not (path / MANIFEST_NAME).is_file():
                    raise OutputExistsError(
                        f"DST {out} is not empty, and has no {MANIFEST_NAME} of an earlier conversion; name "
                        "another directory"
                    )
                return cls(path, overwrite, is_complete=True)
            _require_replaceable(path)
        parent = path
        while not parent.exists():
            parent = parent.parent
        anchor = parent if parent != path else path.parent
        if not anchor.is_dir() or not os.access(anchor, os.W_OK | os.X_OK):
            raise ShardconvError(f"DST {path} cannot be created: no permission to write in {anchor}")
        refuse_if_busy(path, owners)
        return cls(path, overwrite)

    def require_free(self) -> None:
        """Check the directory again, after the plan was made."""
        is_complete = (self.path / MANIFEST_NAME).is_file() and not _is_being_finished(self.path)
        if is_complete and not self.overwrite:
            raise OutputExistsError(
                f"DST {self.path} was written by another process meanwhile; name another directory, "
                "or pass --overwrite"
            )

    def replaced(self) -> list[str]:
        """Return the files of the converted directory that is replaced; the last one makes it complete."""
        self.require_free()
        if not (self.path / MANIFEST_NAME).is_file():
            return []
        return [*(entry.path for entry in read_manifest(self.path).files), PLAN_NAME, MANIFEST_NAME]


def _is_being_finished(path: Path) -> bool:
    """Return whether a run that was interrupted while it moved files to ``path`` can be finished."""
    state = read_state(path / PARTIAL)
    if state is None or state.moves is None:
        return False
    return not (path / MANIFEST_NAME).is_file() or is_placed(path, state.moves)


def _require_apart(path: Path, source: Path) -> None:
    """Require that ``path`` does not contain the model that is read."""
    if source.exists() and source.resolve().is_relative_to(path.resolve()):
        raise OptionError(f"DST {path} holds the model to convert; name another directory")


def _require_replaceable(path: Path) -> None:
    """Require that shardconv wrote every file in ``path``."""
    written = known_files(path)
    if path.is_symlink() or not (written or (path / MANIFEST_NAME).is_file()):
        raise OutputExistsError(
            f"DST {path} was not written by shardconv, so it is not overwritten; name another directory"
        )
    try:
        if (path / MANIFEST_NAME).is_file():
            written |= {MANIFEST_NAME, PLAN_NAME, *(entry.path for entry in read_manifest(path).files)}
    except CheckpointError as error:
        raise ShardconvError(f"DST {path} cannot be replaced: {error}; remove it yourself") from error
    names = sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir() or file.is_symlink()
    )
    strangers = [name for name in names if name not in written and name.split("/")[0] != PARTIAL]
    if strangers:
        raise OutputExistsError(
            f"DST {path} holds {strangers[0]}, which shardconv did not write; move it away first"
        )


AnyOutput = Union[Output, "StoredOutput"]
Write = Callable[[Plan, Mapping[str, LazyTensor], AnyOutput, WriteOptions], object]


def prepared(
    out: str | os.PathLike[str],
    pp: int,
    *,
    overwrite: bool,
    source: str | os.PathLike[str],
    options: WriteOptions,
    settings: Settings,
) -> AnyOutput | StageOutputs:
    """Check that a model may be written to ``out``, without creating it.

    Args:
        settings: the options that decide the plan, with ``tp``. If an earlier run has completed ``out``, its
            plan must have been made with the same.
    """
    tp = int(str(settings["tp"]))
    outputs: AnyOutput | StageOutputs
    if pp == 1:
        outputs = output_at(out, overwrite=overwrite, source=source, owners=options.owners(tp))
        parts = [outputs]
    else:
        outputs = StageOutputs(out, pp, overwrite=overwrite, source=source, options=options, tp=tp)
        parts = outputs.parts
    # What is damaged, or of another number of ranks, is refused before any work.
    for part in (part for part in parts if part.is_complete):
        present = part.present
        manifest = read_manifest(present.directory)
        try:
            if present.objects is not None:
                present.objects.check_sizes(manifest.files)
            else:
                for entry in manifest.files:
                    reader = "every rank" if entry.rank is None else f"rank {entry.rank}"
                    check_size(present.directory, entry, reader)
        except CheckpointError as error:
            problem = str(error).partition(";")[0]
            raise DamagedError(f"{problem}; to write it again, pass --overwrite") from error
        before = settings_of(read_plan(present.directory, manifest))
        changed = {name: before[name] for name in settings if before[name] != settings[name]}
        reason = difference(changed, {name: settings[name] for name in changed})
        refuse_other_output("DST", part.name, reason)
    return outputs


Settings = Mapping[str, object]
"""Options by the names that messages give them."""


def settings_of(plan: Plan) -> Settings:
    """Return the options with which a plan was made."""
    return {
        "tp": plan.tp,
        "pp": num_stages(plan),
        "dtype": plan.model.dtype,
        "experts": plan.experts,
        "devices": plan.devices,
        "sequence_parallel": plan.training is not None and plan.training.sequence is not None,
    }


def output_at(
    out: str | os.PathLike[str],
    *,
    overwrite: bool,
    source: str | os.PathLike[str],
    owners: Collection[str] | None,
) -> AnyOutput:
    """Check that a directory or a URL may be written."""
    if is_url(out):
        from .store_output import StoredOutput  # it imports the client of the Hub

        url = os.fspath(out).rstrip("/")
        return StoredOutput.prepare(url, overwrite=overwrite, source=source)
    return Output.prepare(out, overwrite=overwrite, source=source, owners=owners)


def refuse_other_output(name: str, out: str | Path, reason: str, remedy: str = OTHER_REMEDY) -> None:
    """Raise ``ShardconvError`` if there is a reason for which a finished output is not this run's."""
    if reason:
        raise OutputExistsError(
            f"{name} {out} is not empty: it is complete, and of another conversion ({reason}); {remedy}"
        )


def write_to(
    outputs: AnyOutput | StageOutputs,
    plan: Plan,
    weights: Mapping[str, LazyTensor],
    options: WriteOptions,
    write: Write,
    tell: Callable[[str], object],
) -> None:
    """Write a model, or each of its stages that is not complete, and call ``tell`` for each written stage."""
    if not isinstance(outputs, StageOutputs):
        write(plan, weights, outputs, options)
        return
    for stage in outputs.write(plan, weights, write):
        tell(f"writing stage {stage}")


class StageOutputs:
    """The directories of the stages of one conversion, one in OUT for each stage."""

    def __init__(
        self,
        out: str | os.PathLike[str],
        count: int,
        *,
        overwrite: bool,
        source: str | os.PathLike[str],
        options: WriteOptions,
        tp: int,
    ) -> None:
        names = [stage_directory(stage, count) for stage in range(count)]
        if is_url(out):
            from shardconv_runtime.files.object_stores import listed  # it imports the client of the Hub

            root = os.fspath(out).rstrip("/")
            present = {name.split("/")[0] for name in listed(root).objects}
        else:
            path = Path(out).expanduser().absolute()
            root = str(path)
            present = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        if strangers := sorted(present - set(names)):
            raise OutputExistsError(
                f"DST {out} holds {strangers[0]}, which is none of {count} stages; name another directory"
            )
        directories = [f"{root}/{name}" for name in names]
        options_by_stage = {
            d: stage_options
            for s, d in enumerate(directories)
            if (stage_options := options.of_stage(s, tp)) is not None
        }
        self._outputs = {
            directory: (
                output_at(directory, overwrite=overwrite, source=source, owners=stage_options.owners(tp)),
                stage_options,
            )
            for directory, stage_options in options_by_stage.items()
        }
        self._directories = directories

    @property
    def parts(self) -> list[AnyOutput]:
        """The directories of the stages that this run writes."""
        return [output for output, _ in self._outputs.values()]

    @property
    def is_complete(self) -> bool:
        """Whether earlier runs have completed all of them."""
        return all(part.is_complete for part in self.parts)

    def write(self, plan: Plan, weights: Mapping[str, LazyTensor], write: Write) -> Iterator[int]:
        """Compare the stages that are complete, then write the others, and yield each number before."""
        assert plan.stages is not None
        plans = [replace(plan, stages=replace(plan.stages, own=s)) for s in range(plan.stages.count)]
        for is_complete in (True, False):
            for stage, (stage_plan, directory) in enumerate(zip(plans, self._directories, strict=True)):
                output, options = self._outputs.get(directory, (None, None))
                if output is None or options is None or output.is_complete != is_complete:
                    continue
                if not is_complete:
                    yield stage
                write(stage_plan, held_by(plan, stage, weights), output, options)
