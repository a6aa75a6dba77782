"""Solve a converted directory again: for the installed versions, or for another number of ranks.

``replan`` keeps the shards if they fit, and ``reshard`` writes others, file to file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.errors import MissingFileError, PlanError
from shardconv_runtime.files import manifest
from shardconv_runtime.files.converted_files import ConvertedFiles, parts_of
from shardconv_runtime.files.manifest import Manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import to_text
from shardconv_runtime.format.plan import Plan, global_shape
from shardconv_runtime.format.stage_names import num_stages
from shardconv_runtime.format.stored_layout import layout_sha256, stored_plans
from shardconv_runtime.keywords import Moved, checked_keywords
from shardconv_runtime.storage.file_access import is_local
from shardconv_runtime.versions import tool_versions

from ..arguments import (
    WRITING_FIELDS,
    SolveOptions,
    Writing,
    parse_memory,
    parse_ranks,
    parse_size,
    require_tp,
)
from ..reporting.progress import Progress, Silent
from ..writing.outputs import WriteOptions, prepared
from . import derived_directory
from .derived_directory import has_sequence_form, planned_spec, require_trusted
from .file_checks import require_intact
from .replaced_documents import replace_document


@in_default_modes
def replan(
    out: str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    check: bool = True,
    sequence_parallel: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Solve ``out`` again and rewrite its plan; the shards do not change.

    ``plan.json`` is replaced before ``manifest.json``, each atomically. If the process dies between the
    two, ``load`` raises an error, and running this again repairs the directory.

    Args:
        out: a converted directory, the directory of one stage, or the directory of all stages; or its URL
            in an object store.
        trust_remote_code: import the Python code in ``out``; necessary if its plan was made with it.
        check: check the new plan numerically.
        sequence_parallel: add a sequence-parallel form. A plan that has one keeps it.
        progress: where to report progress.

    Returns:
        The new plan; with stages, the plan of all of them.

    Raises:
        PlanError: if the new plan has another layout for some tensor, so the model must be converted again;
            nothing was changed.
        ShardconvError: if ``out`` is not a converted directory, or its model cannot be planned.
    """
    parts = [
        _Part(each, manifest.read(each.directory), plan_json.read(each.directory / manifest.PLAN_NAME))
        for each in parts_of(out)
    ]
    first = parts[0]
    old = first.plan
    require_trusted(out, old, trust_remote_code=trust_remote_code)

    # torch and transformers are imported once the directory is known to be readable.
    from .new_solution import solved_again

    spec = planned_spec(first.files.directory, old)
    is_wanted = sequence_parallel or has_sequence_form(old)
    layers = old.stages.layers if old.stages is not None else ()
    if any(first > last for first, last in layers):  # `--stages` cannot express a stage without layers
        layers = ()
    text = ",".join(f"{first}-{last}" for first, last in layers)
    options = SolveOptions(
        old.tp, old.experts, is_wanted, check, measure=True, pp=num_stages(old), stages=text
    )
    tell = (progress or Silent()).stage
    new = solved_again(spec, old, options, tell)
    plans = []
    for part in parts:
        plan = new
        if new.stages is not None and part.plan.stages is not None:
            plan = replace(new, stages=replace(new.stages, own=part.plan.stages.own))
        _require_same_layout(part.files, part.manifest, part.plan, plan)
        plans.append(plan)
    # Nothing is written before all parts are checked. In each, the plan is replaced before the manifest.
    for part, plan in zip(parts, plans, strict=True):
        part_manifest = part.manifest
        text = plan_json.dumps(plan)
        plan_sha256 = plan_json.sha256(text)
        replace_document(part.files, manifest.PLAN_NAME, text)
        numerics = (
            part_manifest.numerics if plan_sha256 == part_manifest.plan_sha256 else None
        )  # measured with another plan
        tools = {**part_manifest.tools, **tool_versions()}
        renewed = replace(part_manifest, plan_sha256=plan_sha256, tools=tools, numerics=numerics)
        replace_document(part.files, manifest.MANIFEST_NAME, manifest.dumps(renewed))
    return new


@dataclass(frozen=True)
class _Part:
    """A converted directory, of a model or of a stage."""

    files: ConvertedFiles
    manifest: Manifest
    plan: Plan


def _require_same_layout(files: ConvertedFiles, found: Manifest, old: Plan, new: Plan) -> None:
    """Check that the files have the layout of the new plan. Their headers say so; ``plan.json`` is not
    trusted."""
    layout = layout_sha256(new)
    if layout != layout_sha256(old):
        where = f", --on (its plan is for {old.devices})" if old.devices else ""
        raise PlanError(
            f"{files.name}: {_first_difference(old, new)}, so the shards cannot be kept; "
            f"convert {found.source.name} again, with --tp {found.tp}{where} and --overwrite"
        )
    for entry in found.files:
        if entry.path.endswith(".safetensors"):
            file = files.file(entry.path)
            if is_local(file) and not file.is_file():
                raise MissingFileError(f"{files.name}: {entry.path} is missing; convert the model again")
            manifest.check_shard(file, entry.rank, found.tp, layout)


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


# Reshard a converted directory for another number of ranks, file to file.


@in_default_modes
@checked_keywords({**WRITING_FIELDS, "pp": Moved("stages")})
def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    tp: int,
    *,
    stages: int | str = 1,
    writing: Writing | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Solve the model of a converted directory for ``tp`` ranks and write its shards to ``dst``.

    The weights come from ``src`` and are not cast; the original checkpoint is not needed. Converting it
    would give the same files. To continue an interrupted run, call it again with the same arguments.

    Args:
        src: a converted directory, or its URL in an object store.
        dst: directory to create, or its URL. It must not exist, be empty, or hold the unfinished files of an
            earlier run, unless ``writing`` says ``overwrite``.
        tp: number of ranks.
        stages: number of pipeline stages, or the first and last layer of each, for example
            ``"0-39,40-79"``. ``src`` may have another number, or none.
        writing: which files are written, and how: ``Writing(ranks=..., max_file_size=..., ...)``.
        trust_remote_code: import the Python code in ``src``; necessary if its plan was made with it.
        check: simulate the ranks in float64 and check the plan before anything is written.
        progress: where to report progress.

    Returns:
        The plan, as in ``dst/plan.json``.

    Raises:
        ShardconvError: the message names the problem and the remedy.

    Example:
        >>> plan = shardconv.reshard("out/", "out-4/", tp=4)
    """
    require_tp(tp)
    writing = writing or Writing()
    layers = stages if isinstance(stages, str) else ""
    pp = layers.count(",") + 1 if isinstance(stages, str) else stages
    write_options = WriteOptions(
        parse_size(writing.max_file_size), parse_memory(writing.memory), parse_ranks(writing.ranks, tp * pp)
    )
    derived_directory.require_apart(src, dst)
    outputs = prepared(
        dst, pp, overwrite=writing.overwrite, source=src, options=write_options, settings={"tp": tp}
    )
    source = derived_directory.read(src, trust_remote_code=trust_remote_code)
    if not outputs.is_complete:
        require_intact(src, progress or Silent())

    # torch and transformers are imported once the arguments are known to be right.
    from .new_solution import resharded

    has_sequence_form = tp > 1 and derived_directory.has_sequence_form(source.plan)
    options = SolveOptions(
        tp, source.plan.experts, has_sequence_form, check, measure=True, pp=pp, stages=layers
    )
    return resharded(source, outputs, options, write_options, progress or Silent())
