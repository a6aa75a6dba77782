"""How a model writes calls of tools: read from the chat template, which writes those of earlier answers.

The response template says how calls are read, and often many texts are one call. The chat template writes
one of them, which the model has seen in training. A grammar for calls allows this one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import parse_response

from ..errors import brief
from .response_templates import CALLS, REASONING_FIELDS, ResponseTemplate, literals
from .structural_tags import constant, one_of, schema_grammar, sequence

NAMES = ("shardconvfirst", "shardconvsecond")
"""Names of functions to find in the text of a chat template; of letters, which no template changes."""
IDS = ("shardcnv1", "shardcnv2")
"""Ids of calls, as some templates demand them: nine letters and digits."""
ARGUMENT = "shardconvargument"


@dataclass(frozen=True)
class CallSyntax:
    """The texts around the names and arguments of calls: ``begin NAME between ARGUMENTS end``.

    Attributes:
        next: in place of ``end`` and another ``begin`` before the next call; None if only one call is known.
        triggers: texts that every call begins with; None if others may begin one.
        excludes: texts that may not be in arguments, since they would end the call.
    """

    begin: str
    between: str
    end: str
    next: str | None
    triggers: tuple[str, ...] | None
    excludes: tuple[str, ...]

    def text(self, functions: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of calls of functions, each with ``name`` and ``arguments``."""
        calls = [f"{each['name']}{self.between}{json.dumps(each['arguments'])}" for each in functions]
        return f"{self.begin}{(self.next or '').join(calls)}{self.end}"

    def calls(self, schemas: Mapping[str, Any], *, is_one: bool) -> dict[str, Any]:
        """Return the grammar of one or several calls, as xgrammar's structural tag.

        Args:
            schemas: name of a function -> schema of its arguments.
            is_one: there is exactly one call.
        """
        parts = [self._one(self.begin, schemas)]
        if self.next is not None and not is_one:
            parts.append({"type": "star", "content": self._one(self.next, schemas)})
        return sequence(*parts, constant(self.end))

    def text_with_calls(self, schemas: Mapping[str, Any]) -> dict[str, Any]:
        """Return the grammar of text in which each call follows the schemas."""
        tags = []
        for name, schema in schemas.items():
            parts = [self._arguments(schema)]
            if self.next is not None and not self.next.endswith(self.begin):  # calls in one list
                parts.append({"type": "star", "content": self._one(self.next, schemas)})
            begin = f"{self.begin}{name}{self.between}"
            tags.append({"type": "tag", "begin": begin, "content": sequence(*parts), "end": self.end})
        return {"type": "triggered_tags", "triggers": list(self.triggers or ()), "tags": tags}

    def _one(self, begin: str, schemas: Mapping[str, Any]) -> dict[str, Any]:
        choices = [
            sequence(constant(f"{begin}{name}{self.between}"), self._arguments(schema))
            for name, schema in schemas.items()
        ]
        return one_of(*choices)

    def _arguments(self, schema: Any) -> dict[str, Any]:
        # xgrammar follows no lengths of strings from which it has to exclude texts.
        has_lengths = any(f'"{name}"' in json.dumps(schema) for name in ("minLength", "maxLength"))
        return schema_grammar(schema, () if has_lengths else self.excludes)


def call_syntax(template: ResponseTemplate, tokenizer: Any, end_texts: Iterable[str]) -> CallSyntax:
    """Return how the chat template of a tokenizer writes calls.

    Args:
        end_texts: texts of the tokens that end an answer.

    Raises:
        ValueError: the chat template does not tell, or the response template does not read it.
    """
    if not template.has_calls:
        raise ValueError("the response template has no calls of tools")
    begin, between, end = _around_calls(_written(template, tokenizer, 1, tuple(end_texts)), 1)
    field, following = template.fields[CALLS], None
    try:
        two = _around_calls(_written(template, tokenizer, 2, tuple(end_texts)), 2)
        if (two[0], two[1], two[3], two[4]) == (begin, between, between, end):
            following = two[2]
    except ValueError:
        pass  # a template may refuse two calls
    excludes = tuple(text for text in literals(field.get("close")) if text.strip() == text)
    syntax = CallSyntax(begin, between, end, following, _triggers(field, begin), excludes)
    # The proof: transformers reads what the grammar allows.
    for count in (1,) if following is None else (1, 2):
        functions = [{"name": name, "arguments": {"a": "b"}} for name in NAMES[:count]]
        try:
            message = parse_response(syntax.text(functions), dict(template.spec), prefix="")
        except Exception as error:  # of functions that the template chooses
            raise ValueError(f"the response template does not read calls: {brief(error)}") from error
        if [call.get("function", call) for call in message.get(CALLS, [])] != functions:
            raise ValueError("the response template reads other calls than the chat template writes")
    return syntax


def _written(template: ResponseTemplate, tokenizer: Any, count: int, end_texts: tuple[str, ...]) -> str:
    """Return calls as the chat template writes them in an answer."""
    calls = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": {ARGUMENT: ARGUMENT}}}
        for each, name in zip(IDS[:count], NAMES, strict=False)
    ]
    tools = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
        for name in NAMES
    ]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    except Exception as error:  # of the template
        raise ValueError(f"the chat template does not take calls of tools: {brief(error)}") from error
    answer = template.after_anchor(text)
    if answer is None or any(name not in answer for name in NAMES[:count]):
        raise ValueError("the chat template does not write calls into an answer")
    if any(each in answer for each in IDS):
        raise ValueError("the chat template writes ids of calls, which a model would have to make up")
    # A template may write empty reasoning in front of the calls.
    parser, begin = template.parser(""), 0
    for position, character in enumerate(answer[: answer.index(NAMES[0])], 1):
        closed = [each["field"] for each in parser.feed(character) if each["type"] == "region_close"]
        if set(closed) & set(REASONING_FIELDS):
            begin = position
    ends = [answer.index(text) for text in end_texts if text in answer]
    return answer[begin : min(ends, default=len(answer))].strip()


def _around_calls(text: str, count: int) -> list[str]:
    """Return the texts before, between and after the names and arguments of calls."""
    parts = []
    for name in NAMES[:count]:
        arguments = re.search(rf'{name}(.*?)(\{{\s*"{ARGUMENT}"\s*:\s*"{ARGUMENT}"\s*\}})', text, re.DOTALL)
        if arguments is None or text.count(name) != 1:
            raise ValueError("the chat template does not write the name and then the arguments as JSON")
        parts += [text[: text.index(name)], arguments[1]]
        text = text[arguments.end() :]
    return [*parts, text]


def _triggers(field: Mapping[str, Any], begin: str) -> tuple[str, ...] | None:
    """Return texts with one of which every call begins that the response template reads; None if unknown."""
    triggers = literals(field.get("open")) or tuple(filter(None, [_literal_begin(field["open_pattern"])]))
    # A call that begins otherwise than the chat template writes it would follow no schema.
    return triggers if len(triggers) == 1 and begin.startswith(triggers) else None


def _literal_begin(pattern: str) -> str:
    """Return the text with which all matches of a regular expression begin, after optional space."""
    rest = re.sub(r"^(\\s|\\n)[*?]", "", pattern)
    text = ""
    while rest and "|" not in re.sub(r"\\.|\(.*?\)", "", pattern):
        match = re.match(r"\\([^\w\s])|([^\\.^$*+?{}\[\]|()])", rest)
        if match is None:
            break
        rest = rest[match.end() :]
        if re.match(r"[*?{]", rest):  # it may be left out
            break
        text += match[1] or match[2]
    return text
