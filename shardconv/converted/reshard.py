"""A converted directory for another number of ranks, file to file."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.stored_layout import stored_plans
from shardconv_runtime.tensors.gathered import gathered, is_interleaved
from shardconv_runtime.tensors.lazy_tensor import LazyTensor

from ..arguments import MAX_FILE_SIZE, MEMORY, SolveOptions, parse_memory, parse_ranks, parse_size, require_tp
from ..reporting.progress import Progress, Silent
from ..writing.outputs import Output, WriteOptions, prepared, write_to
from . import derived
from .shards import Converted

if TYPE_CHECKING:
    from ..writing.writer import Origin


def reshard(
    out: str | os.PathLike[str],
    out2: str | os.PathLike[str],
    tp: int,
    *,
    pp: int = 1,
    stages: str = "",
    max_file_size: int | str = MAX_FILE_SIZE,
    memory: int | str = MEMORY,
    ranks: Collection[int] | str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    check: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Solve the model of a converted directory for ``tp`` ranks and write its shards to ``out2``.

    The weights come from the shards in ``out`` and are not cast; the checkpoint that these were made from
    is not needed. The files are those that converting it would give. A run that was killed is continued
    by the same call.

    Args:
        out: a converted directory.
        out2: directory to make; it must not exist, be empty, or hold the unfinished files of an earlier
            run, unless ``overwrite``.
        tp: number of ranks.
        pp, stages: stages of a pipeline, and their layers, see ``convert``; ``out`` may have others, or none.
        max_file_size: bytes of a shard file, or text as ``"5GB"``; a tensor is never split.
        memory: I/O buffer size in bytes, or text.
        ranks: the ranks to write, or text as ``"0-3,6"``; by default all. See ``convert``.
        trust_remote_code: import the Python code in ``out``; needed where the plan was made so.
        overwrite: replace ``out2`` if it is a converted directory, and nothing else.
        check: check the plan on numbers (ranks simulated in float64) before anything is written.
        progress: where to report to.

    Returns:
        The plan, as in ``out2/plan.json``.

    Raises:
        ShardconvError: the message has the problem and the remedy.

    Example:
        >>> plan = shardconv.reshard("out/", "out-4/", tp=4)
    """
    progress = progress or Silent()
    require_tp(tp)
    write_options = WriteOptions(parse_size(max_file_size), parse_memory(memory), parse_ranks(ranks, tp * pp))
    derived.require_apart(out, out2)
    outputs = prepared(out2, pp, overwrite=overwrite, source=out, options=write_options, tp=tp)
    found = derived.read(out, trust_remote_code=trust_remote_code)
    origin = _origin(found)

    from shardconv_runtime.checkpoint.packed_plan import (
        packings_of,
        planned_steps,
        with_packed_notes,
        with_packings,
    )

    from ..pipeline.stages import solve_plan
    from ..writing.writer import write

    spec = derived.spec_of(found)
    has_sequence_form = tp > 1 and derived.has_sequence_form(found.plan)
    options = SolveOptions(
        tp, found.plan.experts, has_sequence_form, check, measure=True, pp=pp, stages=stages
    )
    solved: Plan = solve_plan(spec, options, steps=planned_steps(found.plan), progress=progress.stage)
    solved = with_packed_notes(with_packings(solved, packings_of(found.plan)), spec.quantization)
    weights = derived.weights_of(found)
    _require_same_tensors(found, weights, solved)

    def write_one(own: Plan, held: Mapping[str, LazyTensor], output: Output, part: WriteOptions) -> bool:
        return write(own, held, output, origin, part, progress)

    gathered_weights = _gathered(weights, solved)
    write_to(outputs, solved, gathered_weights, origin.source, write_options, write_one, progress.stage)
    return solved


def _origin(found: Converted) -> Origin:
    from ..writing.writer import Origin

    return Origin(
        found.manifest.source,
        derived.identity(found),
        lambda directory: derived.copy_small_files(found, directory),
        lambda: derived.identity(found),
        copy_unused=lambda directory: derived.copy_unused(found, directory),
    )


def _gathered(weights: Mapping[str, LazyTensor], new: Plan) -> dict[str, LazyTensor]:
    """The weights, those in bands that are interleaved on some rank of the new plan."""
    from shardconv_runtime.checkpoint.packed_plan import shard

    return {
        name: gathered(name, weights[name])
        if any(is_interleaved(shard(entry, weights[name], new.mesh, rank)) for rank in range(new.tp))
        else weights[name]
        for name, entry in stored_plans(new).items()
    }


def _require_same_tensors(found: Converted, weights: Mapping[str, LazyTensor], new: Plan) -> None:
    """All that is stored is in the new plan, of its dtype: one of other versions might cast or leave out."""
    wanted = stored_plans(new)
    first = dict(found.plan.tied)  # a tied tensor is kept under any of its names
    kept = {first.get(name, name) for name in wanted if name in weights}
    for name in sorted({*weights, *wanted}):
        problem = ""
        if name not in weights:
            problem = "which is not there"
        elif first.get(name, name) not in kept:
            problem = "which the model lacks in this environment"
        elif name in wanted and weights[name].dtype != wanted[name].dtype:
            problem = f"which is in {weights[name].dtype} there, and in {wanted[name].dtype} here"
        if problem:
            raise PlanError(
                f"{found.directory} cannot be resharded for {name}, {problem}; "
                "use the version of transformers that it was planned for, or convert the model again"
            )
