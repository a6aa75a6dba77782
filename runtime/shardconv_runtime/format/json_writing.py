"""Frozen dataclasses as deterministic JSON, which ``typed_json`` reads."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .dims import Leaf, Product, Sum, to_text


def dump_document(value: Any, format_name: str) -> str:
    """One JSON object, a dataclass with a ``version``; long lists have one item per line."""
    fields = {"format": format_name, "version": value.version} | _fields(value)
    lines = (f"  {json.dumps(key)}: {_dump_field(item)}" for key, item in fields.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def to_json(value: Any) -> Any:
    """The JSON form of a value; fields with their defaults are left out."""
    if isinstance(value, Leaf | Product | Sum):
        return "0" if value == Leaf(0) else to_text(value)  # a dim of a parameter without elements
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_json(value[key]) for key in sorted(value)}
    return value


def _fields(value: Any) -> dict[str, Any]:
    return {
        field.name: to_json(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if not field.init or getattr(value, field.name) != field.default
    }


def _dump_field(item: Any) -> str:
    if isinstance(item, list) and item and not isinstance(item[0], int):
        return "[\n" + ",\n".join(f"    {_compact(part)}" for part in item) + "\n  ]"
    return _compact(item)


def _compact(item: Any) -> str:
    return json.dumps(item, ensure_ascii=False, allow_nan=False)
