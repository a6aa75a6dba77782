"""Solve a converted directory again for the installed versions, and keep its shards where they fit."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from shardconv_runtime.errors import CheckpointError, PlanError, SourceError
from shardconv_runtime.format import manifest, manifest_writing
from shardconv_runtime.format import plan_json as codec
from shardconv_runtime.format.dims import to_text
from shardconv_runtime.format.manifest import Manifest
from shardconv_runtime.format.plan import Plan, global_shape
from shardconv_runtime.format.stored_layout import layout_sha256, stored_plans

from ..arguments import SolveOptions
from ..reporting.progress import Progress, Silent
from .derived import has_sequence_form
from .older_plans import read_any_version


def replan(
    out: str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    check: bool = True,
    sequence_parallel: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Solve ``out`` again and rewrite its plan; the shards stay as they are.

    ``plan.json`` is replaced before ``manifest.json``, each atomically. If the process dies between
    the two, ``load`` refuses the directory, and running this again repairs it.

    Args:
        out: a converted directory.
        trust_remote_code: import the Python code in ``out``; needed where the plan was made so.
        check: check the new plan on numbers.
        sequence_parallel: with a sequence-parallel form, which a plan that has one keeps.
        progress: where to report to.

    Returns:
        The new plan.

    Raises:
        PlanError: the new plan lays out some tensor in another way, so that a conversion is needed;
            nothing was changed.
        ShardconvError: ``out`` is not a converted directory, or its model cannot be planned.
    """
    directory = Path(out)
    found = manifest.read(directory)
    old = read_any_version(directory / manifest.PLAN_NAME)
    if old.stages is not None:
        raise PlanError(
            f"{out} is a stage of {old.stages.count}, which replan does not know yet; convert it again"
        )
    if old.model.trust_remote_code and not trust_remote_code:
        raise SourceError(f"{out} runs custom code; read its *.py files, then pass --trust-remote-code")

    from shardconv_runtime.checkpoint.packed_plan import (
        packings_of,
        planned_steps,
        with_packed_notes,
        with_packings,
    )
    from shardconv_runtime.checkpoint.resolve import resolve

    from ..pipeline.stages import solve_plan
    from ..writing.writer import tool_versions

    spec = resolve(directory, trust_remote_code=trust_remote_code, dtype=old.model.dtype, need_weights=False)
    is_wanted = sequence_parallel or has_sequence_form(old)
    options = SolveOptions(old.tp, old.experts, is_wanted, check, measure=True)
    tell = (progress or Silent()).stage
    new: Plan = solve_plan(spec, options, steps=planned_steps(old), progress=tell)
    new = with_packed_notes(with_packings(new, packings_of(old)), spec.quantization)
    _require_same_layout(directory, found, old, new)
    plan_sha256 = codec.write(new, directory / manifest.PLAN_NAME)
    tools = {**found.tools, **tool_versions()}
    numerics = found.numerics if plan_sha256 == found.plan_sha256 else None  # measured with the old plan
    renewed = dataclasses.replace(found, plan_sha256=plan_sha256, tools=tools, numerics=numerics)
    manifest_writing.write(renewed, directory)
    return new


def _require_same_layout(directory: Path, found: Manifest, old: Plan, new: Plan) -> None:
    """The files themselves say which layout they have; what is in ``plan.json`` is not trusted for it."""
    layout = layout_sha256(new)
    if layout != layout_sha256(old):
        raise PlanError(
            f"{directory}: {_first_difference(old, new)}, so the shards cannot be kept; "
            f"convert {found.source.name} again, with --tp {found.tp} and --overwrite"
        )
    for entry in found.files:
        if entry.path.endswith(".safetensors"):
            path = manifest.resolve(directory, entry.path)
            if not path.is_file():
                raise CheckpointError(f"{directory}: {entry.path} is missing; convert the model again")
            manifest.check_shard(path, entry.rank, found.tp, layout)


def _first_difference(old: Plan, new: Plan) -> str:
    before, after = stored_plans(old), stored_plans(new)
    for name in (*before, *after):
        if name not in after or name not in before:
            return f"{name} is no longer a parameter" if name not in after else f"{name} is a new parameter"
        a, b = before[name], after[name]
        if global_shape(a) != global_shape(b) or a.dtype != b.dtype:
            return f"{name} is now {b.dtype} {list(global_shape(b))}"
        if (a.dims, a.partial) != (b.dims, b.partial):
            was, now = (", ".join(map(to_text, entry.dims)) for entry in (a, b))
            return f"{name} is laid out as [{now}] now, and was as [{was}]"
    return "parameters are tied in another way"
