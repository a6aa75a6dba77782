"""A directory with an adapter and the plan of its model with it, as ``shardconv adapt`` writes it.

Beside ``adapter_plan.json`` it has what the peft library saves, so that peft loads it too. Each rank takes
its part out of the ordinary file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CodeMismatchError, PlanError, SourceError
from ..format import plan_json
from ..format.fingerprint import check_code
from ..format.manifest import sha256_checksum
from ..format.plan import Plan
from .adapter_names import ANY_NAME, CONFIG_NAME, DEFAULT, PLAN_NAME, WEIGHTS_NAME
from .attaching import Adapter, read_config

Given = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
"""A directory, or several by the names that the adapters get."""


@dataclass(frozen=True)
class PlannedAdapter:
    """An adapter, and the plan of its model with it."""

    adapter: Adapter
    plan: Plan
    """Its name in there is ``ANY_NAME``."""
    content: str
    """Checksums of its files."""


def read_adapters(given: Given) -> dict[str, PlannedAdapter]:
    """Read the configs and plans of adapters, by their names.

    Raises:
        SourceError: a directory has no adapter, or none that was adapted.
        PlanError: a plan cannot be read, or a name cannot be that of an adapter.
        CodeMismatchError: the installed code is not the one that an adapter was adapted for.
    """
    directories = given if isinstance(given, Mapping) else {DEFAULT: given}
    if not directories:
        raise PlanError("adapter={} names no adapter; leave it out")
    return {require_name(name): _read(Path(directory)) for name, directory in directories.items()}


def require_name(name: str) -> str:
    """The name, if it can be that of an adapter.

    Raises:
        PlanError: it cannot.
    """
    if not isinstance(name, str) or not name or "." in name or "/" in name or name == ANY_NAME:
        raise PlanError(f"{name!r} cannot be the name of an adapter; give one without dots and slashes")
    return name


def _read(directory: Path) -> PlannedAdapter:
    for name, remedy in (
        (CONFIG_NAME, "name the directory that `shardconv adapt` wrote"),
        (PLAN_NAME, f"run `shardconv adapt OUT {directory} NEW` for the model OUT, and load NEW"),
        (WEIGHTS_NAME, "copy the directory again"),
    ):
        if not (directory / name).is_file():
            raise SourceError(f"{directory}: it has no {name}; {remedy}")
    plan = plan_json.read(directory / PLAN_NAME)
    try:
        check_code(plan)
    except CodeMismatchError as error:
        raise CodeMismatchError(f"{directory}: {error} (for an adapter: `shardconv adapt`)") from error
    files = (PLAN_NAME, CONFIG_NAME, WEIGHTS_NAME)
    content = " ".join(sha256_checksum(directory / name) for name in files)
    return PlannedAdapter(Adapter(read_config(directory), str(directory)), plan, content)
