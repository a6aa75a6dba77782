"""Binds a plan to the source of the model code that it was solved for.

Attribute overrides and module names mean nothing for other code, so that a rank refuses a plan solved for
other code than the installed one. The source is read, not imported: a mismatch shows before torch starts.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec

from ..errors import CodeMismatchError
from ..format.plan import CodeInfo, Plan

_MISSING = "missing"


def fingerprint(module_names: Sequence[str]) -> str:
    """Return the sha256 (hex) over the names and the source of these modules; order and repetition do not
    matter.

    Line endings are normalized. A module that is not installed, or has no source, counts as
    ``missing``. No module is imported.
    """
    digest = hashlib.sha256()
    for name in sorted(set(module_names)):
        digest.update(f"{name} {_source_digest(name)}\n".encode())
    return digest.hexdigest()


def code_info(module_names: Iterable[str]) -> CodeInfo:
    """Return the installed code, for a plan that is solved from these modules."""
    sources = tuple(sorted(set(module_names)))
    return CodeInfo(_version("torch"), _version("transformers"), sources, fingerprint(sources))


def check_code(plan: Plan) -> None:
    """Check that the installed model code is the code that the plan is for.

    The source decides, not the versions: another build of torch with the same model code is fine.
    """
    code = plan.code
    if fingerprint(code.sources) == code.fingerprint:
        return
    missing = [name for name in code.sources if _source_digest(name) == _MISSING]
    lacking = f" ({missing[0]} is not installed)" if missing else ""
    raise CodeMismatchError(
        f"the model code differs from the code that the plan was solved for{lacking}: "
        f"the plan is for transformers {code.transformers} with torch {code.torch}, "
        f"installed are transformers {_version('transformers')} and torch {_version('torch')}; "
        "run `shardconv reshard SRC --in-place` to solve again for the installed code, or install the plan's "
        "versions"
    )


def _source_digest(name: str) -> str:
    spec, source = _find(name), None
    if spec is not None and isinstance(spec.loader, InspectLoader):
        with suppress(ImportError, OSError, SyntaxError, UnicodeDecodeError):
            source = spec.loader.get_source(name)
    if source is None:
        return _MISSING
    text = source.replace("\r\n", "\n").replace("\r", "\n")
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _find(name: str) -> ModuleSpec | None:
    """Return the spec of a module, found from its top package down without importing any."""
    locations: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    components = name.split(".")
    if not all(components):
        return None
    for depth in range(1, len(components) + 1):
        spec = _find_in(".".join(components[:depth]), locations)
        if spec is None or (spec.submodule_search_locations is None and depth < len(components)):
            return None
        places = spec.submodule_search_locations
        locations = None if places is None else list(map(os.fspath, places))  # finders ignore Path objects
    return spec


def _find_in(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    loaded: ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None:
        return loaded
    specs = (finder.find_spec(name, locations) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _MISSING
