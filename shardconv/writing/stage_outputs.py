"""The directories of the stages of a pipeline, written one after another; complete ones are kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.format import plan_json as codec
from shardconv_runtime.format.manifest import MANIFEST_NAME, Source
from shardconv_runtime.format.manifest import read as read_manifest
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.small_files import stage_directory
from shardconv_runtime.format.staged_names import held_by
from shardconv_runtime.tensors.lazy_tensor import LazyTensor

from .job import PARTIAL
from .output import Output, WriteOptions

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
    """Check that a model may be written to ``out``, without creating it.

    Args:
        out: the directory to write.
        pp: number of stages.
        overwrite: whether converted directories may be replaced.
        source: the model; it may not be in ``out``.
        options: which ranks are written.
        tp: number of ranks of a stage.

    Raises:
        ShardconvError: it may not.
    """
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
    """Write a model, or each of its stages that is not complete; ``tell`` is called with what is written."""
    if isinstance(outputs, Output):
        write(plan, weights, outputs, options)
        return
    for stage in outputs.write(plan, weights, source, write):
        tell(f"writing stage {stage}")


class StageOutputs:
    """Where the stages of one conversion go: a directory in OUT for each.

    Args:
        out: of the conversion.
        count: of stages, 2 or more.
        overwrite: whether converted directories may be replaced.
        source: the model; it may not be in ``out``.
        options: which ranks are written: stages without any are left out.
        tp: number of ranks of a stage.

    Raises:
        ShardconvError: ``out`` holds something else, or all stages already.
    """

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
        if path.is_dir() and (others := sorted({entry.name for entry in path.iterdir()} - set(names))):
            raise ShardconvError(
                f"OUT {out} holds {others[0]}, which is none of {count} stages; name another directory"
            )
        directories = [path / name for name in names]
        wanted = {d: own for s, d in enumerate(directories) if (own := options.of_stage(s, tp)) is not None}
        complete = [directory for directory in wanted if not overwrite and _is_complete(directory)]
        self._complete = complete if len(complete) < len(wanted) else []
        """Those that an interrupted run has completed."""
        self._outputs = {
            directory: (
                Output.prepare(directory, overwrite=overwrite, source=source, owners=own.owners(tp)),
                own,
            )
            for directory, own in wanted.items()
            if directory not in self._complete
        }
        self._directories = directories

    def write(
        self, plan: Plan, weights: Mapping[str, LazyTensor], source: Source, write: Write
    ) -> Iterator[int]:
        """Write each stage that is not complete; yields its number before.

        Args:
            plan: with stages.
            weights: global tensors to store, by the first of their names.
            source: of the weights.
            write: writes a directory.

        Raises:
            ShardconvError: a complete stage is that of another conversion.
        """
        assert plan.stages is not None
        plans = [replace(plan, stages=replace(plan.stages, own=s)) for s in range(plan.stages.count)]
        for own, directory in zip(plans, self._directories, strict=True):
            if directory in self._complete:
                _require_same(directory, own, source)
        for stage, (own, directory) in enumerate(zip(plans, self._directories, strict=True)):
            if directory in self._outputs:
                yield stage
                write(own, held_by(plan, stage, weights), *self._outputs[directory])


def _is_complete(directory: Path) -> bool:
    return (directory / MANIFEST_NAME).is_file() and not (directory / PARTIAL).exists()


def _require_same(directory: Path, plan: Plan, source: Source) -> None:
    found = read_manifest(directory)
    if (found.plan_sha256, found.source) != (codec.sha256(codec.dumps(plan)), source):
        raise ShardconvError(
            f"{directory} is complete, and of another conversion than this one; name another OUT, or pass "
            "--overwrite"
        )
