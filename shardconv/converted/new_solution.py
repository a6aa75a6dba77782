"""Solve the model of a converted directory again, for ``reshard`` and ``replan``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.checkpoint.packed_plan import (
    packings_of,
    planned_grains,
    shard,
    with_packed_notes,
    with_packings,
)
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.stored_layout import stored_plans

from ..arguments import SolveOptions
from ..passes import solve_plan
from ..reporting.progress import Progress
from ..writing.outputs import AnyOutput, StageOutputs, WriteOptions, write_to
from ..writing.writer import Origin, write
from . import derived_directory
from .derived_directory import gathered, is_interleaved
from .shards import Converted


def solved_again(spec: ModelSpec, old: Plan, options: SolveOptions, tell: Callable[[str], None]) -> Plan:
    """Return a new plan of a model whose weights stay packed like in the old plan."""
    solved = solve_plan(spec, options, grains=planned_grains(old), progress=tell)
    return with_packed_notes(with_packings(solved, packings_of(old)), spec.quantization)


def resharded(
    found: Converted,
    outputs: AnyOutput | StageOutputs,
    options: SolveOptions,
    write_options: WriteOptions,
    progress: Progress,
) -> Plan:
    """Solve a converted directory for other ranks and write their shards. See ``replan.reshard``."""
    origin = Origin(
        found.manifest.source,
        derived_directory.identity(found),
        lambda directory: derived_directory.copy_small_files(found, directory),
        lambda: derived_directory.identity(found),
        copy_unused=lambda directory: derived_directory.copy_unused(found, directory),
        errors=lambda: derived_directory.errors(found),
    )
    solved = solved_again(derived_directory.spec_of(found), found.plan, options, progress.stage)
    weights = derived_directory.weights_of(found)
    # The new plan needs all stored tensors, in their dtypes. Other versions might cast or leave some out.
    planned = stored_plans(solved)
    first = dict(found.plan.tied)  # a tied tensor is kept under any of its names
    unchanged = {first.get(name, name) for name in planned if name in weights}
    for name in sorted({*weights, *planned}):
        problem = ""
        if name not in weights:
            problem = "which is not there"
        elif first.get(name, name) not in unchanged:
            problem = "which the model lacks in this environment"
        elif name in planned and weights[name].dtype != planned[name].dtype:
            problem = f"which is in {weights[name].dtype} there, and in {planned[name].dtype} here"
        if problem:
            raise PlanError(
                f"{found.files.name} cannot be resharded for {name}, {problem}; "
                "use the version of transformers that it was planned for, or convert the model again"
            )

    def write_one(own: Plan, held: Mapping[str, LazyTensor], output: AnyOutput, part: WriteOptions) -> bool:
        return write(own, held, output, origin, part, progress)

    # Weights that are interleaved on some rank of the new plan are read in bands.
    gathered_weights = dict[str, LazyTensor]()
    for name, entry in planned.items():
        lazy = weights[name]
        parts = (shard(entry, lazy, solved.mesh, rank) for rank in range(solved.tp))
        gathered_weights[name] = gathered(name, lazy) if any(map(is_interleaved, parts)) else lazy
    write_to(outputs, solved, gathered_weights, write_options, write_one, progress.stage)
    return solved
