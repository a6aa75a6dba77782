"""The directories that a conversion writes: one, or one for each stage of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.errors import CheckpointError, ShardconvError
from shardconv_runtime.files.manifest import MANIFEST_NAME, PLAN_NAME, Source, rank_directory
from shardconv_runtime.files.manifest import read as read_manifest
from shardconv_runtime.files.small_files import stage_directory
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.stage_names import held_by

from .job import PARTIAL, is_placed, known_files, read_state
from .workspace import refuse_if_busy


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

    @classmethod
    def prepare(
        cls,
        out: str | os.PathLike[str],
        *,
        overwrite: bool,
        source: str | os.PathLike[str],
        owners: Collection[str] | None = None,
    ) -> Output:
        """Check that ``out`` may be written, without creating it."""
        path = Path(out).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise ShardconvError(f"OUT {out} is a file; name a directory that does not exist yet")
        if path.is_dir() and any(file.name != PARTIAL for file in path.iterdir()):
            if not overwrite and not _is_being_finished(path):
                raise ShardconvError(f"OUT {out} is not empty; name another directory, or pass --overwrite")
            _require_replaceable(path, Path(source).expanduser())
        parent = path
        while not parent.exists():
            parent = parent.parent
        anchor = parent if parent != path else path.parent
        if not anchor.is_dir() or not os.access(anchor, os.W_OK | os.X_OK):
            raise ShardconvError(f"OUT {path} cannot be created: no permission to write in {anchor}")
        refuse_if_busy(path, owners)
        return cls(path, overwrite)

    def require_free(self) -> None:
        """Check the directory again, after the plan was made."""
        is_complete = (self.path / MANIFEST_NAME).is_file() and not _is_being_finished(self.path)
        if is_complete and not self.overwrite:
            raise ShardconvError(
                f"OUT {self.path} was written by another process meanwhile; name another directory, "
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


def _require_replaceable(path: Path, source: Path) -> None:
    """Require that shardconv wrote every file in ``path``."""
    if source.exists() and source.resolve().is_relative_to(path.resolve()):
        raise ShardconvError(f"OUT {path} holds the model to convert; name another directory")
    written = known_files(path)
    if path.is_symlink() or not (written or (path / MANIFEST_NAME).is_file()):
        raise ShardconvError(
            f"OUT {path} was not written by shardconv, so it is not overwritten; name another directory"
        )
    try:
        if (path / MANIFEST_NAME).is_file():
            written |= {MANIFEST_NAME, PLAN_NAME, *(entry.path for entry in read_manifest(path).files)}
    except CheckpointError as error:
        raise ShardconvError(f"OUT {path} cannot be replaced: {error}; remove it yourself") from error
    names = sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir() or file.is_symlink()
    )
    strangers = [name for name in names if name not in written and name.split("/")[0] != PARTIAL]
    if strangers:
        raise ShardconvError(
            f"OUT {path} holds {strangers[0]}, which shardconv did not write; move it away first"
        )


Write = Callable[[Plan, Mapping[str, LazyTensor], Output, WriteOptions], object]


def prepared(
    out: str | os.PathLike[str],
    pp: int,
    *,
    overwrite: bool,
    source: str | os.PathLike[str],
    options: WriteOptions,
    tp: int,
) -> Output | StageOutputs:
    """Check that a model may be written to ``out``, without creating it."""
    if pp == 1:
        return Output.prepare(out, overwrite=overwrite, source=source, owners=options.owners(tp))
    return StageOutputs(out, pp, overwrite=overwrite, source=source, options=options, tp=tp)


def write_to(
    outputs: Output | StageOutputs,
    plan: Plan,
    weights: Mapping[str, LazyTensor],
    source: Source,
    options: WriteOptions,
    write: Write,
    tell: Callable[[str], object],
) -> None:
    """Write a model, or each of its stages that is not complete, and call ``tell`` for each written stage."""
    if isinstance(outputs, Output):
        write(plan, weights, outputs, options)
        return
    for stage in outputs.write(plan, weights, source, write):
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
        path = Path(out).expanduser().absolute()
        names = [stage_directory(stage, count) for stage in range(count)]
        if path.is_dir() and (strangers := sorted({entry.name for entry in path.iterdir()} - set(names))):
            raise ShardconvError(
                f"OUT {out} holds {strangers[0]}, which is none of {count} stages; name another directory"
            )
        directories = [path / name for name in names]
        options_by_stage = {
            d: stage_options
            for s, d in enumerate(directories)
            if (stage_options := options.of_stage(s, tp)) is not None
        }
        # A complete stage has no workspace left.
        complete = [
            directory
            for directory in options_by_stage
            if not overwrite
            and ((directory / MANIFEST_NAME).is_file() and not (directory / PARTIAL).exists())
        ]
        self._complete = complete if len(complete) < len(options_by_stage) else []
        """Directories that an interrupted run has completed."""
        self._outputs = {
            directory: (
                Output.prepare(
                    directory, overwrite=overwrite, source=source, owners=stage_options.owners(tp)
                ),
                stage_options,
            )
            for directory, stage_options in options_by_stage.items()
            if directory not in self._complete
        }
        self._directories = directories

    def write(
        self, plan: Plan, weights: Mapping[str, LazyTensor], source: Source, write: Write
    ) -> Iterator[int]:
        """Write each stage that is not complete, and yield its number before."""
        assert plan.stages is not None
        plans = [replace(plan, stages=replace(plan.stages, own=s)) for s in range(plan.stages.count)]
        for stage_plan, directory in zip(plans, self._directories, strict=True):
            if directory not in self._complete:
                continue
            complete, plan_sha256 = read_manifest(directory), plan_json.sha256(plan_json.dumps(stage_plan))
            if (complete.plan_sha256, complete.source) != (plan_sha256, source):
                raise ShardconvError(
                    f"{directory} is complete, and of another conversion than this one; name another OUT, "
                    "or pass --overwrite"
                )
        for stage, (stage_plan, directory) in enumerate(zip(plans, self._directories, strict=True)):
            if directory in self._outputs:
                yield stage
                write(stage_plan, held_by(plan, stage, weights), *self._outputs[directory])
