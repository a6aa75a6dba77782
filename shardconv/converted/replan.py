"""Solve a converted directory again for the installed versions, and keep its shards where they fit."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardconv_runtime.errors import CheckpointError, PlanError
from shardconv_runtime.format import manifest, plan_json
from shardconv_runtime.format import plan_json as codec
from shardconv_runtime.format.dims import to_text
from shardconv_runtime.format.manifest import Manifest
from shardconv_runtime.format.plan import VERSION, Plan, global_shape
from shardconv_runtime.format.small_files import stage_directories
from shardconv_runtime.format.staged_names import num_stages
from shardconv_runtime.format.stored_layout import layout_sha256, stored_plans
from shardconv_runtime.format.typed_json import MalformedError, decode, read_text
from shardconv_runtime.parallel.default_modes import in_default_modes
from shardconv_runtime.versions import tool_versions

from ..arguments import SolveOptions
from ..reporting.progress import Progress, Silent
from .derived import has_sequence_form, planned_spec, require_trusted

# Plans of earlier versions of the format, for ``replan``, which carries their directories over.

_INFERENCE_ONLY = "for inference only: "
"""How the note of version 1 begins that says why a plan has no gradients; since then it is a field."""


def read_any_version(path: str | os.PathLike[str]) -> Plan:
    """Read a plan of this version of the format or of an earlier one.

    Raises:
        PlanError: if it is malformed, or of a later version.
    """
    try:
        text = read_text(Path(path), plan_json.MAX_BYTES)
        found = decode(text)
        if isinstance(found, dict) and found.get("version") == 1:
            found = _from_version_1(found)
        if isinstance(found, dict) and found.get("version") == 2:
            found = _from_version_2(found)
        if isinstance(found, dict) and found.get("version") == 3:  # no products were fused
            found |= {"version": 4}
        if isinstance(found, dict) and found.get("version") == 4:
            text = json.dumps(_from_version_4(found))
        return plan_json.loads(text)
    except (MalformedError, PlanError) as error:
        raise PlanError(f"{os.fspath(path)}: {error}") from error


def _from_version_1(document: dict[str, Any]) -> dict[str, Any]:
    notes = document.get("notes", [])
    if not isinstance(notes, list):
        return document | {"version": 2}
    reasons = [n for n in notes if isinstance(n, str) and n.startswith(_INFERENCE_ONLY)]
    moved = {"inference_only": reasons[0].removeprefix(_INFERENCE_ONLY)} if reasons else {}
    return document | {"version": 2, "notes": [n for n in notes if n not in reasons]} | moved


def _from_version_2(document: dict[str, Any]) -> dict[str, Any]:
    """Blocks of float8 values were two fields of a parameter; they are a packing."""
    parameters = document.get("parameters", [])
    if not isinstance(parameters, list):
        return document | {"version": 3}
    model = document.get("model")
    dtype = model.get("dtype") if isinstance(model, dict) else None
    return document | {
        "version": 3,
        "parameters": [_with_packing(entry, dtype) for entry in parameters],
    }


def _from_version_4(document: dict[str, Any]) -> dict[str, Any]:
    """A step had another name."""

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("op") == "zero_foreign":
            value = value | {"op": "zero_out_of_shard"}
        return {name: renamed(item) for name, item in value.items()}

    changed = {name: renamed(document[name]) for name in ("modules", "training") if name in document}
    return document | {"version": VERSION} | changed


def _with_packing(entry: Any, dtype: Any) -> Any:
    block = entry.get("block") if isinstance(entry, dict) else None
    if not isinstance(block, list):
        return entry
    kept = {name: value for name, value in entry.items() if name not in ("block", "block_dtype", "dtype")}
    values = {
        "name": "*",
        "dtype": entry.get("dtype"),
        "dims": [{"of": i, "step": 1} for i in range(len(block))],
    }
    scales = [{"of": i, "step": length} for i, length in enumerate(block)]
    factors = {"name": "*_scale_inv", "dtype": entry.get("block_dtype"), "dims": scales}
    return kept | {"dtype": dtype, "packing": {"method": "fp8", "tensors": [values, factors]}}


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
        out: a converted directory, the directory of one stage, or the directory of all stages.
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
    parts = [_read(part) for part in stage_directories(Path(out)) or [Path(out)]]
    first = parts[0]
    old = first.plan
    require_trusted(out, old, trust_remote_code=trust_remote_code)

    from .solved_again import solved_again

    spec = planned_spec(first.directory, old)
    is_wanted = sequence_parallel or has_sequence_form(old)
    options = SolveOptions(
        old.tp,
        old.experts,
        is_wanted,
        check,
        measure=True,
        pp=num_stages(old),
        stages=_layers_of_stages(old),
    )
    tell = (progress or Silent()).stage
    new = solved_again(spec, old, options, tell)
    plans = [_stored(new, part.plan) for part in parts]
    for part, plan in zip(parts, plans, strict=True):
        _require_same_layout(part.directory, part.manifest, part.plan, plan)
    for part, plan in zip(parts, plans, strict=True):
        _write(part, plan, tool_versions())
    return new


@dataclass(frozen=True)
class _Part:
    """A converted directory, of a model or of a stage."""

    directory: Path
    manifest: Manifest
    plan: Plan
    """Of whatever version."""


def _read(directory: Path) -> _Part:
    return _Part(directory, manifest.read(directory), read_any_version(directory / manifest.PLAN_NAME))


def _layers_of_stages(plan: Plan) -> str:
    """As for ``--stages``; empty where a stage has no layers, or there are no stages."""
    layers = plan.stages.layers if plan.stages is not None else ()
    if any(first > last for first, last in layers):
        return ""
    return ",".join(f"{first}-{last}" for first, last in layers)


def _stored(new: Plan, old: Plan) -> Plan:
    """The plan for the directory of the same stage."""
    if new.stages is None or old.stages is None:
        return new
    return replace(new, stages=replace(new.stages, own=old.stages.own))


def _write(part: _Part, plan: Plan, versions: Mapping[str, str]) -> None:
    """Replace the plan, and then the manifest."""
    found = part.manifest
    plan_sha256 = codec.write(plan, part.directory / manifest.PLAN_NAME)
    numerics = found.numerics if plan_sha256 == found.plan_sha256 else None  # measured with the old plan
    tools = {**found.tools, **versions}
    renewed = replace(found, plan_sha256=plan_sha256, tools=tools, numerics=numerics)
    manifest.write(renewed, part.directory)


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
