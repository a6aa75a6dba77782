"""The parts of a JSON schema that xgrammar leaves out, without a word: such a schema is refused.

Found by asking xgrammar 0.2.8 whether it accepts values that the schema does not allow,
``tests/field/test_schemas_that_are_followed.py``. A grammar that allows less than the schema does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

IGNORED = (
    "uniqueItems",
    "contains",
    "not",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that have no effect."""
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords beside which others have no effect."""
OF_A_TYPE = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
)
"""Keywords that have no effect without ``type``."""
CONSTRAINTS = frozenset(
    (
        *ALONE,
        *OF_A_TYPE,
        "type",
        "format",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
    )
)
"""Keywords that say which values are allowed; others describe them."""
OF_ONE_SCHEMA = (
    "items",
    "additionalProperties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
OF_A_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is a schema, a list of them, or has them by names."""
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def ignored_part(schema: Any) -> str | None:
    """Return a part of a schema that xgrammar would ignore; None if there is none."""
    return next((reason for each in _schemas(schema) if (reason := _ignored(each)) is not None), None)


def _ignored(schema: dict[str, Any]) -> str | None:
    for name in IGNORED:
        if schema.get(name, False) is not False:
            return name
    alone = [name for name in ALONE if name in schema]
    if alone:
        beside = sorted(schema.keys() & CONSTRAINTS - {alone[0]})
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if beside == ["type"] and values is not None and all(_is_of(each, schema["type"]) for each in values):
            return None
        return f"{', '.join(beside)} beside {alone[0]}" if beside else None
    if "type" not in schema and (without := [name for name in OF_A_TYPE if name in schema]):
        return f"{without[0]} without type"
    if "pattern" in schema and "format" in schema:
        return "pattern beside format"
    required, properties = schema.get("required", []), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        missing = [name for name in required if name not in properties]
        if missing:
            return f"required {missing[0]!r:.100} that is not in properties"
    return None


def _is_of(value: Any, types: Any) -> bool:
    """Return whether a value has one of the types, as a schema names them."""
    names = types if isinstance(types, list) else [types]
    return any(
        isinstance(value, TYPES.get(str(name), ())) and (name == "boolean" or not isinstance(value, bool))
        for name in names
    )


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and those inside of it."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        yield each
        waiting += [each.get(name) for name in OF_ONE_SCHEMA]
        for name in OF_A_LIST:
            waiting += each[name] if isinstance(each.get(name), list) else []
        for name in OF_NAMES:
            waiting += each[name].values() if isinstance(each.get(name), dict) else []
