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
            found = _from_version_1(found)
        if isinstance(found, dict) and found.get("version") == 2:
            found = _from_version_2(found)
        if isinstance(found, dict) and found.get("version") == 3:  # no products were fused
            text = json.dumps(found | {"version": VERSION})
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
