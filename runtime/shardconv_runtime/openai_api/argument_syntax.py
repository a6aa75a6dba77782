"""How the arguments of a call are written: as JSON, or each with its name in a tag."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .structural_tags import constant, one_of, schema_grammar, sequence

OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
"""Keywords of strings that a text without quotes cannot follow."""


@dataclass(frozen=True)
class JsonArguments:
    """Arguments that are one JSON object.

    Attributes:
        excludes: texts that may not be in strings, since they would end the call.
    """

    excludes: tuple[str, ...] = ()

    def text(self, arguments: Mapping[str, str]) -> str:
        """Return the text of arguments."""
        return json.dumps(arguments)

    def grammar(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the grammar of arguments of a schema."""
        # xgrammar follows no lengths of strings from which it has to exclude texts.
        has_lengths = any(f'"{name}"' in json.dumps(schema) for name in ("minLength", "maxLength"))
        return schema_grammar(schema, () if has_lengths else self.excludes)


@dataclass(frozen=True)
class TagArguments:
    """Arguments with tags: ``before NAME between VALUE after``, strings without quotes and others as JSON."""

    before: str
    between: str
    after: str

    def text(self, arguments: Mapping[str, str]) -> str:
        """Return the text of arguments, which are strings."""
        return "".join(
            f"{self.before}{name}{self.between}{value}{self.after}" for name, value in arguments.items()
        )

    def grammar(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the grammar of arguments of a schema, in its order.

        Raises:
            ValueError: the schema asks for more than tags can follow.
        """
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("type") != "object" or not isinstance(properties, dict):
            raise ValueError("arguments in tags need a schema with type object and properties")
        if unknown := [name for name in required if name not in properties]:
            raise ValueError(f"the schema requires {unknown[0]!r:.100}, which is not in its properties")
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parts = []
        for name, value in properties.items():
            begin = constant(f"{self.before}{name}{self.between}")
            part = sequence(begin, self._value(value, definitions), constant(self.after))
            parts.append(part if name in required else {"type": "optional", "content": part})
        return sequence(*parts) if parts else constant("")

    def _value(self, schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
        schema = schema if isinstance(schema, dict) else {}
        if isinstance(schema.get("enum"), list):
            return one_of(*(constant(_shown(value)) for value in schema["enum"]))
        if "const" in schema:
            return constant(_shown(schema["const"]))
        if "$ref" not in schema and _may_be_string(schema):
            if refused := [name for name in OF_STRINGS if name in schema]:
                raise ValueError(f"strings in tags cannot follow {refused[0]}")
            return {"type": "any_text", "excludes": [self.after.strip()]}
        return schema_grammar({**schema, **definitions})


def _may_be_string(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", [])
    choices = [each for name in ("anyOf", "oneOf") for each in schema.get(name, [])]
    if not kinds and not choices:
        return True
    is_string = "string" in (kinds if isinstance(kinds, list) else [kinds])
    return is_string or any(isinstance(each, dict) and _may_be_string(each) for each in choices)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
