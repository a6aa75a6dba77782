"""``config.json`` and ``generation_config.json`` of a converted directory, which may come from anybody.

transformers' configurations can do more than hold values: name another file to read, code of a repository to
import, a kernel to download. Such entries are refused before transformers sees them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DamagedError, MissingFileError, PlanError, ShardconvError, brief
from ..format.plan import Plan
from .manifest import MANIFEST_NAME, Manifest, resolve

# Sets that are iterated in one order in all processes and copies.


class SteadySet(set[Any]):
    """A set that is iterated in the order of its elements' representations.

    The order of a set of strings depends on the process, and on how the set was made: a copy may have another
    order. A forward pass that loops over one would call its modules in another order on another rank.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=repr))


CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

MAX_BYTES = 16 * 2**20
"""Largest of these files that is read."""

_IMPLEMENTATION = re.compile(r"_?[a-z]+_implementation(_internal)?")
"""Keys that choose how attention or experts are computed; a value with a slash is a repository of code."""

_REPOSITORY = re.compile(r"(hf[-_]hub|local-dir):")
"""Prefixes of values that libraries of models download."""


def read_config(directory: Path, manifest: Manifest, plan: Plan) -> Any:
    """Return the config object of a converted directory; no code is imported unless the plan says so."""
    # transformers takes seconds to import, and the command line, which imports this file, does without.
    from transformers import AutoConfig

    if not _check(directory, manifest, CONFIG):
        raise MissingFileError(
            f"{directory}: {CONFIG} is missing from {MANIFEST_NAME}; convert the model again"
        )
    try:
        return AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=plan.model.trust_remote_code
        )
    except Exception as error:  # a config class may raise anything on values that it does not expect
        raise PlanError(f"{directory}: {CONFIG} is not a valid config: {brief(error)}") from error


def read_generation_config(directory: Path, manifest: Manifest) -> Any | None:
    """Return the generation config of a converted directory; None if it has none."""
    if not _check(directory, manifest, GENERATION_CONFIG):
        return None
    from transformers import GenerationConfig  # takes seconds, see above

    try:
        return GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{directory}: {GENERATION_CONFIG} is not valid: {brief(error)}") from error


def building_failed(directory: Path, error: Exception) -> Exception:
    """Return the error for a constructor that raised ``error``, which any value of its config may cause."""
    if isinstance(error, ShardconvError):
        return error
    return PlanError(f"{directory}: the model cannot be built from its {CONFIG}: {brief(error)}")


def _check(directory: Path, manifest: Manifest, name: str) -> bool:
    """Return whether the converted directory has a file, which is checked for unsafe entries."""
    if not any(entry.path == name for entry in manifest.files):
        return False
    path = resolve(directory, name)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{directory}: {name} is larger than {MAX_BYTES} bytes")
        config = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{directory}: {name} cannot be read as JSON: {brief(error)}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{directory}: {name} is not a JSON object")
    if problem := unsafe_entry(config):
        raise CheckpointError(f"{directory}: {name}: {problem}; remove it, and convert again")
    return True


def unsafe_entry(config: Mapping[str, Any]) -> str:
    """Return a config's entry that would make transformers read, import or download; empty if none."""
    for key, value in _items(config):
        if problem := _problem(key, value):
            return f"{key}: {problem}"
    return ""


def _items(found: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys of all nested objects, with the values that are neither objects nor lists."""
    todo: list[tuple[str, Any]] = [("", found)]
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            inherited = key if key == "auto_map" or _IMPLEMENTATION.fullmatch(key) else ""
            todo.extend((inherited or name, item) for name, item in value.items())
            yield from ((name, None) for name in value)
        elif isinstance(value, list):
            todo.extend((key, item) for item in value)
        else:
            yield key, value


def _problem(key: str, value: Any) -> str:
    if key == "configuration_files":
        return "another file would be read instead"
    if key == "checkpoint_path" or (key == "use_pretrained_backbone" and value):
        return "it would load weights from outside of this directory"
    if not isinstance(value, str):
        return ""
    if key == "auto_map" and "--" in value:
        return f"it names code of another repository ({value[:80]!r})"
    if _IMPLEMENTATION.fullmatch(key) and "/" in value:
        return f"it names a repository of kernels ({value[:80]!r}), whose code would run"
    if _REPOSITORY.match(value):
        return f"it names something to download ({value[:80]!r})"
    return ""
