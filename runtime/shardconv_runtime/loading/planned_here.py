"""The plan of a model that was not converted: rank 0 makes it when the model is loaded, and keeps it.

Planning takes seconds and needs the package shardconv; a plan from the cache needs neither. The file of a
plan is named after everything that it follows from: the model's configuration and code, the sizes of its
weight files, the versions of the libraries, the number of ranks, and the options.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..checkpoint.model_location import locate
from ..comm.mesh import PP, Launch
from ..comm.rank_0 import from_rank_0, without_drawing
from ..errors import CodeMismatchError, LaunchError, PlanError
from ..files import fingerprint
from ..files.hub_downloads import plan_path
from ..files.manifest import MANIFEST_NAME, PLAN_NAME
from ..files.model_config import CONFIG
from ..files.small_files import CACHE_VARIABLE, EXAMPLE_NAME, VARIANT, cache_directory
from ..format import plan_json
from ..format.plan import Plan
from ..format.typed_json import write_text
from ..option_values import Planning
from ..versions import converter_function, tool_versions
from .by_plan import ordinary
from .checked_source import CheckedSource, LoadOptions
from .in_memory import source_in_memory

_log = logging.getLogger(__name__)

_DECISIVE = ("*.json", "*.py", EXAMPLE_NAME)
"""Files whose bytes a plan may follow from; of other files, the name and the size."""
_TEXTS = ("tokenizer", "vocab", "added_tokens", "special_tokens", "merges")
"""Beginnings of names of files that it does not follow from."""


def is_ordinary(directory: Path) -> bool:
    """Return whether a directory has a model that was not converted."""
    if not (directory / CONFIG).is_file():
        return False
    names = [path.name for path in directory.iterdir()]
    converted = (MANIFEST_NAME, PLAN_NAME)
    return not any(name in converted or VARIANT.fullmatch(name) for name in names)


def with_plan(options: LoadOptions, plan: str | Plan) -> CheckedSource:
    """Return the ordinary model that the caller named, with its plan or the plan in a file."""
    solved = plan if isinstance(plan, Plan) else plan_json.read(plan_path(plan, options.hub))
    if options.in_memory is not None:
        return source_in_memory(options.in_memory, solved)
    return ordinary(
        options.path, solved, options.hub, trust_remote_code=options.trust_remote_code, dtype=options.dtype
    )


def plan_on_rank_0(options: LoadOptions, start: Launch) -> Plan:
    """Plan a model for the processes that load it; every rank calls it and gets the same plan."""
    planning = options.plan if isinstance(options.plan, Planning) else Planning()
    pp = planning.pp
    if options.mesh is not None and PP in (options.mesh.mesh_dim_names or ()):
        pp = int(options.mesh[PP].size()) * options.stages_per_process
    if pp < 1 or start.world_size * options.stages_per_process % pp:
        raise LaunchError(
            f"{start.world_size} processes with {options.stages_per_process} stage(s) each cannot hold {pp} "
            "stages of the same number of ranks; give another number of stages (pp=), or of processes"
        )
    tp = start.world_size * options.stages_per_process // pp
    if start.group is None:
        return plan_json.loads(_plan_text(options, planning, tp, pp))
    text = from_rank_0(partial(_plan_text, options, planning, tp, pp), start.group)
    return plan_json.loads(text)


def _plan_text(options: LoadOptions, planning: Planning, tp: int, pp: int) -> str:
    """Return a model's plan as JSON, from the cache or made now."""
    settings = {
        "tp": tp,
        "pp": pp,
        "stages": planning.stages,
        "experts": planning.experts,
        "sequence_parallel": options.sequence_parallel,
        "check": planning.check,
    }
    path = _cached(options, planning, settings)
    if path is not None and path.is_file():
        try:
            plan = plan_json.read(path)
            fingerprint.check_code(plan)
        except (PlanError, CodeMismatchError):
            pass  # a file that was cut off, or code that was edited under the same version: made again
        else:
            _log.warning(
                "%s was not converted: its plan for %d ranks is the one of an earlier start, in %s",
                options.path,
                tp * pp,
                path,
            )
            return plan_json.dumps(plan)
    if options.in_memory is None:
        _log.warning(
            "%s was not converted: it is planned for %d ranks now, and each rank reads its part of the "
            "checkpoint; `shardconv convert` makes this check its numbers, and start faster",
            options.path,
            tp * pp,
        )
    make = converter_function("plan", f"{options.path} has no plan yet, and making one")
    model: Any = options.path if options.in_memory is None else options.in_memory.twin
    with without_drawing():
        plan = make(
            model,
            hub=options.hub,
            trust_remote_code=options.trust_remote_code,
            example_inputs=planning.example_inputs,
            **settings,
        )
    text = plan_json.dumps(plan)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        except OSError as error:
            _log.warning("the plan is not kept for the next start: %s; set %s", error, CACHE_VARIABLE)
    return text


def _cached(options: LoadOptions, planning: Planning, settings: dict[str, Any]) -> Path | None:
    """Return the path of a plan's file in the cache; None if no file name can stand for the model."""
    if options.in_memory is not None or planning.example_inputs is not None:
        return None
    code = options.trust_remote_code
    located = locate(options.path, options.hub, code=code, need_weights=False)
    files = _described(located.directory, with_sizes=located.commit is None)
    content = {"settings": settings, "versions": tool_versions(), "files": files, "code": code}
    name = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return cache_directory() / "plans" / f"{name}.json"


def _described(directory: Path, *, with_sizes: bool) -> dict[str, str | int]:
    """Return the files of a model -> their checksum, or their size."""
    described: dict[str, str | int] = {}
    for path in sorted(directory.iterdir()):
        if not path.is_file() or path.name.startswith((".", *_TEXTS)):
            continue
        if any(path.match(pattern) for pattern in _DECISIVE):
            described[path.name] = sha256(path.read_bytes()).hexdigest()
        elif with_sizes:  # of the Hub, some may not be in the cache yet
            described[path.name] = path.stat().st_size
    return described
