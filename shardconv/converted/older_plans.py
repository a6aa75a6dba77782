"""Plans of earlier versions of the format, for ``replan``, which carries their directories over."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shardconv_runtime.errors import PlanError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import VERSION, Plan
from shardconv_runtime.format.typed_json import MalformedError, decode, read_text

_INFERENCE_ONLY = "for inference only: "
"""How the note of version 1 begins that says why a plan has no gradients; since then it is a field."""


def read_any_version(path: str | os.PathLike[str]) -> Plan:
    """Read a plan of this version of the format or of an earlier one.

    Raises:
        PlanError: it is malformed, or of a later version.
    """
    try:
        text = read_text(Path(path), plan_json.MAX_BYTES)
        found = decode(text)
        if isinstance(found, dict) and found.get("version") == 1:
            text = json.dumps(_from_version_1(found))
        return plan_json.loads(text)
    except (MalformedError, PlanError) as error:
        raise PlanError(f"{os.fspath(path)}: {error}") from error


def _from_version_1(document: dict[str, Any]) -> dict[str, Any]:
    notes = document.get("notes", [])
    if not isinstance(notes, list):
        return document | {"version": VERSION}
    reasons = [n for n in notes if isinstance(n, str) and n.startswith(_INFERENCE_ONLY)]
    moved = {"inference_only": reasons[0].removeprefix(_INFERENCE_ONLY)} if reasons else {}
    return document | {"version": VERSION, "notes": [n for n in notes if n not in reasons]} | moved
