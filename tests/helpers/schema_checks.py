"""Checks a JSON value with the part of JSON Schema that docs/schemas uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def problems(value: Any, schema: dict[str, Any], document: dict[str, Any], where: str = "$") -> Iterator[str]:
    """Yield what is wrong with a value.

    Args:
        value: plain JSON.
        schema: a schema in the document.
        document: the document, for references.
        where: the place of the value, for messages.
    """
    unknown = schema.keys() - {
        "$ref",
        "anyOf",
        "type",
        "items",
        "properties",
        "required",
        "additionalProperties",
        "description",
    }
    assert not unknown, f"the check does not know {unknown}"
    if "$ref" in schema:
        found = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        yield from problems(value, found, document, where)
        return
    if "anyOf" in schema:
        options = [list(problems(value, each, document, where)) for each in schema["anyOf"]]
        if all(options):
            yield f"{where}: none of the schemas fits: {options}"
        return
    kind = schema["type"]
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{where}: {value!r} is no {kind}"
        return
    if kind == "array":
        for index, item in enumerate(value):
            yield from problems(item, schema["items"], document, f"{where}[{index}]")
    if kind == "object":
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (f"{where}: lacks {name}" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            if name in properties:
                yield from problems(item, properties[name], document, f"{where}.{name}")
            elif rest is False:
                yield f"{where}: {name} is not in the schema"
            elif isinstance(rest, dict):
                yield from problems(item, rest, document, f"{where}.{name}")
