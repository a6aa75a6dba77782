"""How a model writes calls of tools, read from the chat template, which writes the calls of earlier answers.

The response template says how calls are read, and often many texts are one call. The chat template writes
one of them, which the model has seen in training. A grammar for calls allows this one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import parse_response

from ..errors import brief
from .argument_syntax import JsonArguments, TagArguments
from .response_templates import CALLS, CONTENT, REASONING_FIELDS, ResponseTemplate, literal_begin, mark_texts
from .structural_tags import constant, one_of, sequence

NAMES = ("shardconvfirst", "shardconvsecond")
"""Names of functions to find in the text of a chat template; of letters, which no template changes."""
IDS = ("shardcnv1", "shardcnv2")
"""Ids of calls, as some templates demand them: nine letters and digits."""
KEYS = ("shardconvkey", "shardconvother")
VALUES = ("shardconvvalue", "shardconvtext")
UNKNOWN = "the chat template writes calls in a form that is not known: neither JSON behind a name nor tags"


@dataclass(frozen=True)
class CallSyntax:
    """The texts around the names and arguments of calls: ``begin NAME between ARGUMENTS end``.

    Attributes:
        next: in place of ``end`` and another ``begin`` before the next call; None if only one call is known.
        triggers: texts that every call begins with; None if others may begin one.
        arguments: how arguments are written.
    """

    begin: str
    between: str
    end: str
    next: str | None
    triggers: tuple[str, ...] | None
    arguments: JsonArguments | TagArguments = field(default_factory=JsonArguments)

    def text(self, functions: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of calls of functions, each with ``name`` and ``arguments``."""
        calls = [
            f"{each['name']}{self.between}{self.arguments.text(each['arguments'])}" for each in functions
        ]
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
            parts = [self.arguments.grammar(schema)]
            if self.next is not None and not self.next.endswith(self.begin):  # calls in one list
                parts.append({"type": "star", "content": self._one(self.next, schemas)})
            begin = f"{self.begin}{name}{self.between}"
            tags.append({"type": "tag", "begin": begin, "content": sequence(*parts), "end": self.end})
        return {"type": "triggered_tags", "triggers": list(self.triggers or ()), "tags": tags}

    def _one(self, begin: str, schemas: Mapping[str, Any]) -> dict[str, Any]:
        choices = [
            sequence(constant(f"{begin}{name}{self.between}"), self.arguments.grammar(schema))
            for name, schema in schemas.items()
        ]
        return one_of(*choices)


def call_syntax(template: ResponseTemplate, tokenizer: Any, end_texts: Iterable[str]) -> CallSyntax:
    """Return how the chat template of a tokenizer writes calls.

    Args:
        end_texts: texts of the tokens that end an answer.

    Raises:
        ValueError: the chat template does not tell, or the response template does not read it.
    """
    if not template.has_calls:
        raise ValueError("the response template has no calls of tools")
    written = partial(_written, template, tokenizer, tuple(end_texts))
    try:
        syntax = _json_syntax(template, written)
    except ValueError:
        syntax = _tag_syntax(template, written)
    # The proof: transformers reads what the grammar allows.
    for count in (1,) if syntax.next is None else (1, 2):
        functions = [{"name": name, "arguments": {"a": "b"}} for name in NAMES[:count]]
        read = _read(template, syntax.text(functions), end_texts).get(CALLS, [])
        if [call.get("function", call) for call in read] != functions:
            raise ValueError("the response template reads other calls than the chat template writes")
    return syntax


def _json_syntax(template: ResponseTemplate, written: Callable[..., str]) -> CallSyntax:
    """Return the syntax of calls whose arguments are JSON."""
    arguments, of_calls = {KEYS[0]: VALUES[0]}, template.fields[CALLS]
    value = rf'\{{\s*"{KEYS[0]}"\s*:\s*"{VALUES[0]}"\s*\}}'
    begin, between, end = _between(written(arguments), NAMES[0], value)
    following = None
    with suppress(ValueError):  # a template may refuse two calls
        two = _between(written(arguments, arguments), NAMES[0], value, NAMES[1], value)
        if (two[0], two[1], two[3], two[4]) == (begin, between, between, end):
            following = two[2]
    excludes = tuple(text for text in mark_texts(of_calls, "close") if text.strip() == text)
    return CallSyntax(begin, between, end, following, _triggers(of_calls, begin), JsonArguments(excludes))


def _tag_syntax(template: ResponseTemplate, written: Callable[..., str]) -> CallSyntax:
    """Return the syntax of calls whose arguments are in tags."""
    one, argument = {KEYS[0]: VALUES[0]}, (KEYS[0], VALUES[0])
    begin, opening, between, closing = _between(written(one), NAMES[0], *argument)
    both = _between(written(dict(zip(KEYS, VALUES, strict=True))), NAMES[0], *argument, KEYS[1], VALUES[1])
    # Between two arguments are the end of the first and the begin of the second.
    num_after = next(n for n in range(len(both[3]) + 1) if opening.endswith(both[3][n:]))
    after, before = both[3][:num_after], both[3][num_after:]
    syntax = CallSyntax(
        begin,
        opening.removesuffix(before),
        closing.removeprefix(after),
        None,
        _triggers(template.fields[CALLS], begin),
        TagArguments(before, between, after),
    )
    if both != [begin, opening, between, both[3], between, closing] or not closing.startswith(after):
        raise ValueError(UNKNOWN)
    if not after.strip() or written({}) != syntax.text([{"name": NAMES[0], "arguments": {}}]):
        raise ValueError(UNKNOWN)
    with suppress(ValueError):  # a template may refuse two calls
        two = _between(written(one, one), NAMES[0], *argument, NAMES[1], *argument)
        if [*two[:3], *two[4:]] == [begin, opening, between, opening, between, closing]:
            return replace(syntax, next=two[3].removeprefix(after))
    return syntax


def _between(text: str, *patterns: str) -> list[str]:
    """Return the texts before, between and after regular expressions, each of which is found once."""
    parts = []
    for pattern in patterns:
        match = re.search(pattern, text)
        if match is None:
            raise ValueError(UNKNOWN)
        parts.append(text[: match.start()])
        text = text[match.end() :]
    if any(name in part for part in (*parts, text) for name in (*NAMES, *KEYS, *VALUES)):
        raise ValueError(UNKNOWN)
    return [*parts, text]


def _written(
    template: ResponseTemplate, tokenizer: Any, end_texts: tuple[str, ...], *arguments: Mapping[str, str]
) -> str:
    """Return calls with these arguments as the chat template writes them in an answer."""
    count = len(arguments)
    calls = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": dict(values)}}
        for each, name, values in zip(IDS, NAMES, arguments, strict=False)
    ]
    tools = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
        for name in NAMES
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    text = _answer(template, tokenizer, end_texts, message, NAMES[0], tools)
    if any(name not in text for name in NAMES[:count]):
        raise ValueError("the chat template does not write several calls into an answer")
    if any(each in text for each in IDS):
        raise ValueError("the chat template writes ids of calls, which a model would have to make up")
    return text


def _answer(
    template: ResponseTemplate,
    tokenizer: Any,
    end_texts: tuple[str, ...],
    message: Mapping[str, Any],
    part: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return an answer as the chat template writes it, without reasoning in front of a part of it."""
    messages = [{"role": "user", "content": "a"}, message]
    try:
        text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    except Exception as error:  # of the template
        raise ValueError(f"the chat template does not take such an answer: {brief(error)}") from error
    answer = template.after_anchor(text)
    if answer is None or part not in answer:
        raise ValueError("the chat template leaves out a part of an answer")
    # A template may write empty reasoning.
    parser, begin = template.parser(""), 0
    for position, character in enumerate(answer[: answer.index(part)], 1):
        closed = [each["field"] for each in parser.feed(character) if each["type"] == "region_close"]
        if reasoning := set(closed) & set(REASONING_FIELDS):
            # The parser sees the end of a pattern by the character behind it.
            begin = position - ("close_pattern" in template.fields[reasoning.pop()])
    ends = [answer.index(text) for text in end_texts if text in answer]
    return answer[begin : min(ends, default=len(answer))].strip()


def content_marks(template: ResponseTemplate, tokenizer: Any, end_texts: Iterable[str]) -> tuple[str, str]:
    """Return the texts before and after the content of an answer, without which it is not read.

    Raises:
        ValueError: the chat template does not tell, or the response template does not read it.
    """
    of_content = template.fields.get(CONTENT)
    if of_content is None:
        raise ValueError("the response template has no content")
    if "open" not in of_content and "open_pattern" not in of_content:
        return "", ""
    message = {"role": "assistant", "content": VALUES[0]}
    begin, end = _between(_answer(template, tokenizer, tuple(end_texts), message, VALUES[0]), VALUES[0])
    if _read(template, f"{begin}[1]{end}", end_texts).get(CONTENT) != "[1]":
        raise ValueError("the response template reads other content than the chat template writes")
    return begin, end


def _read(template: ResponseTemplate, text: str, end_texts: Iterable[str]) -> dict[str, Any]:
    """Return the message of an answer that a token ends whose text may belong to the last mark."""
    for end_text in ("", *end_texts):
        with suppress(Exception):  # of functions that the template chooses
            message: dict[str, Any] = parse_response(text + end_text, dict(template.spec), prefix="")
            return message
    raise ValueError("the response template does not read what the chat template writes")


def _triggers(of_calls: Mapping[str, Any], begin: str) -> tuple[str, ...] | None:
    """Return texts with one of which every call begins that the response template reads; None if unknown."""
    triggers = mark_texts(of_calls, "open")
    if not triggers and (text := literal_begin(of_calls.get("open_pattern", ""))[0]):
        triggers = (text,)
    # A call that begins otherwise than the chat template writes it would follow no schema.
    return triggers if len(triggers) == 1 and begin.startswith(triggers) else None
