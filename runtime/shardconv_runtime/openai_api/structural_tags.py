"""Parts of grammars in the form of xgrammar's structural tags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

MOST_SPACES = 8
"""Most spaces between two parts of an answer: some models would go on with spaces forever."""
SPACE = {"type": "regex", "pattern": rf"[ \n]{{0,{MOST_SPACES}}}"}
ANY_TEXT = {"type": "any_text"}


def constant(text: str) -> dict[str, Any]:
    """Return the grammar of one text."""
    return {"type": "const_string", "value": text}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    """Return the grammar of several parts in order."""
    elements = [part for part in parts if part != constant("")]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def one_of(*parts: dict[str, Any]) -> dict[str, Any]:
    """Return the grammar of one of several parts."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def schema_grammar(schema: Any, excludes: Iterable[str] = ()) -> dict[str, Any]:
    """Return the grammar of a value of a JSON schema.

    Args:
        excludes: texts that may not be in its strings.
    """
    grammar = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_SPACES}
    return grammar | ({"excludes": list(excludes)} if excludes else {})


def schemas_of_tag(tag: Any) -> Iterator[Any]:
    """Yield the JSON schemas in a structural tag."""
    if isinstance(tag, list):
        for part in tag:
            yield from schemas_of_tag(part)
    elif isinstance(tag, dict):
        if tag.get("type") == "json_schema":
            yield tag["json_schema"]
        else:
            yield from schemas_of_tag(list(tag.values()))
