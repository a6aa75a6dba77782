"""The texts that an answer to a chat may have: calls of tools, a JSON schema, and reasoning before them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .call_syntax import CallSyntax
from .chat_request import ChatRequest, ChosenTool
from .response_templates import CONTENT, REASONING_FIELDS, ResponseTemplate, mark_texts
from .schema_keywords import ALONE
from .schemas import BadRequest, Constraint
from .structural_tags import ANY_TEXT, SPACE, constant, one_of, schema_grammar, sequence

NAME = r"[\w.:/-]+"
"""Names of functions that every syntax of calls writes as they are."""


def chat_constraint(
    body: ChatRequest,
    template: ResponseTemplate | None,
    syntax: CallSyntax | str,
    open_field: str | None,
    marks: tuple[str, str] | str = ("", ""),
) -> Constraint | None:
    """Return the constraint of an answer; None for any text.

    Args:
        template: parses the answer; None if it is not parsed.
        syntax: how calls are written, or why that is unknown.
        open_field: the field of the template in which the answer begins.
        marks: texts before and after the content, or why they are unknown.

    Raises:
        BadRequest: the server cannot grant what the request asks for.
    """
    choice = body.tool_choice
    tools = {} if choice == "none" else {tool.function.name: tool.function for tool in body.tools}
    must_call = choice == "required" or isinstance(choice, ChosenTool)
    is_strict = any(function.strict for function in tools.values())
    schema = None if body.response_format is None else body.response_format.value_schema
    if isinstance(choice, ChosenTool):
        name = choice.function.name
        if name not in tools:
            raise BadRequest(f"tool_choice names {name!r:.100}, which is not among the tools", "tool_choice")
        tools = {name: tools[name]}
    if must_call and not tools:
        raise BadRequest(f"tool_choice {choice!r} needs tools", "tool_choice")
    parameter = "tool_choice" if must_call else "tools" if is_strict else "response_format"
    if tools and (must_call or is_strict or schema is not None):
        if isinstance(syntax, str) and (template is not None or schema is None):
            asked = {
                "tool_choice": "calls of tools cannot be demanded",
                "tools": "strict tools cannot be followed",
                "response_format": "an answer cannot follow a schema or else call tools",
            }
            raise BadRequest(f"{asked[parameter]}: {syntax}", parameter)
        if not must_call and schema is None and isinstance(syntax, CallSyntax) and not syntax.triggers:
            raise BadRequest(
                "strict tools cannot be followed: the response template does not tell with which text a call "
                "begins; tool_choice required works",
                "tools",
            )
        if wrong := [name for name in tools if not re.fullmatch(NAME, name)]:
            raise BadRequest(f"a tool has the name {wrong[0]!r:.100}, which no grammar writes", parameter)
    grammar = None
    if isinstance(syntax, CallSyntax) and tools and (must_call or is_strict or schema is not None):
        schemas = {name: _schema_of(function.parameters) for name, function in tools.items()}
        is_one = isinstance(choice, ChosenTool) or not body.parallel_tool_calls
        try:
            if must_call:
                grammar = syntax.calls(schemas, is_one=is_one)
            elif schema is not None:
                calls = syntax.calls(schemas, is_one=is_one)
                grammar = one_of(calls, _content(schema, template, open_field, marks))
            else:
                grammar = syntax.text_with_calls(schemas)
        except ValueError as error:
            raise BadRequest(f"the schema of a tool cannot be followed: {error}", parameter) from error
    elif schema is not None:
        grammar = _content(schema, template, open_field, marks)
    if grammar is None:
        return None
    if body.ignore_eos:
        raise BadRequest("an answer that follows a schema ends where that does", "ignore_eos")
    whole = None if template is None else _after_reasoning(template, open_field, grammar, parameter)
    if whole is None and grammar.get("type") == "json_schema":
        return Constraint(json.dumps(schema), parameter)
    tag = {"type": "structural_tag", "format": whole or grammar}
    return Constraint(json.dumps(tag), parameter, is_tag=True)


def _content(
    schema: dict[str, Any],
    template: ResponseTemplate | None,
    open_field: str | None,
    marks: tuple[str, str] | str,
) -> dict[str, Any]:
    """Return the grammar of content that follows a schema, with the marks that make it content."""
    if template is None or open_field == CONTENT:
        return schema_grammar(schema)
    if isinstance(marks, str):
        raise BadRequest(f"content cannot follow a schema: {marks}", "response_format")
    return sequence(constant(marks[0]), schema_grammar(schema), constant(marks[1]))


def _schema_of(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of arguments, which are an object if the tool does not say."""
    schema = dict(parameters or {})
    return schema if schema.keys() & ALONE else {"type": "object", **schema}


def _after_reasoning(
    template: ResponseTemplate, open_field: str | None, rest: dict[str, Any], parameter: str
) -> dict[str, Any] | None:
    """Return the grammar of reasoning and a rest; None if the template has no reasoning."""
    has_begun = open_field in REASONING_FIELDS
    for name in (open_field,) if has_begun else REASONING_FIELDS:
        field = template.fields.get(str(name), {})
        opens, closes = mark_texts(field, "open"), mark_texts(field, "close")
        if has_begun and not closes:
            raise BadRequest(
                "the answer begins with reasoning, and the response template has no text that ends it",
                parameter,
            )
        begins = ("",) if has_begun else opens
        if begins and closes:
            tags = [{"type": "tag", "begin": each, "content": ANY_TEXT, "end": [*closes]} for each in begins]
            reasoning = one_of(*tags)
            if not has_begun:
                reasoning = {"type": "optional", "content": reasoning}
            return sequence(reasoning, SPACE, rest)
    return None
