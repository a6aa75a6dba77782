"""The template with which a model's answers are parsed: reasoning, content and calls of tools.

transformers reads it from the tokenizer's config and parses with it, see ``parse_response``. A stream gets
the same as a whole answer: both are made from the events of transformers' parser.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers.utils.chat_parsing import ResponseParser

from ..errors import OptionError, brief

LOG = logging.getLogger(__name__)
CALLS = "tool_calls"
"""The field of a template that has calls of tools."""
CONTENT = "content"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates have the reasoning; transformers accepts them, too."""
TAIL_TOKENS = 512
"""Tokens at the end of a prompt in which the answer's beginning is looked for first: a prompt may be long."""


@dataclass(frozen=True)
class ResponseTemplate:
    """A template and where it comes from.

    Attributes:
        spec: the template, as transformers documents it.
        source: the tokenizer, or the option ``--response-template``.
    """

    spec: Mapping[str, Any]
    source: Literal["tokenizer", "option"]

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the fields of a message that the template finds in a text."""
        fields: Mapping[str, Mapping[str, Any]] = self.spec["fields"]
        return fields

    @property
    def has_calls(self) -> bool:
        """Return whether the template finds calls of tools."""
        return CALLS in self.fields

    def without_calls(self) -> ResponseTemplate | None:
        """Return the template that leaves calls in the text, for requests without tools."""
        fields = {name: field for name, field in self.fields.items() if name != CALLS}
        return ResponseTemplate({**self.spec, "fields": fields}, self.source) if fields else None

    def parser(self, begin: str, tools: Sequence[Mapping[str, Any]] = ()) -> Any:
        """Return transformers' parser of an answer.

        Args:
            begin: text of the prompt that is a part of the answer, see ``begin_of_answer``.
            tools: tools of the request, whose schemas tell the types of arguments.
        """
        return ResponseParser(dict(self.spec), prefix=begin, tools=[dict(tool) for tool in tools])

    def after_anchor(self, text: str) -> str | None:
        """Return the text after the last beginning of an answer; None if none begins.

        Without one, transformers' parser would take the whole text for an answer.
        """
        everything = {"rest": {"content_args": {"strip": False}}}
        probe = ResponseParser({**self.spec, "fields": everything}, prefix=text)
        rest = "".join(event.get("text", "") for event in probe.initial_events)
        return None if rest == text else rest

    def begin_of_answer(self, tokenizer: Any, prompt: Sequence[int]) -> str:
        """Return the end of a prompt that is a part of the answer: ``<think>``, for example."""
        for tokens in (prompt[-TAIL_TOKENS:], prompt):
            text = str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
            if (rest := self.after_anchor(text)) is not None:
                return rest
        return ""


def template_of_tokenizer(tokenizer: Any) -> ResponseTemplate | None:
    """Return the template in a tokenizer's config; None if it has none that transformers can parse with."""
    spec = getattr(tokenizer, "response_template", None)
    if spec is None:
        return None
    template = ResponseTemplate(spec, "tokenizer")
    if (reason := _reason_against(template)) is not None:
        LOG.warning("answers are not parsed: the tokenizer's response_template: %s", reason)
        return None
    return template


def template_of_file(path: str) -> ResponseTemplate:
    """Return the template in a JSON file, which may be a tokenizer's config."""
    try:
        spec = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"--response-template {path}: the file cannot be read as JSON: {error}") from error
    if isinstance(spec, dict) and "response_template" in spec:
        spec = spec["response_template"]
    template = ResponseTemplate(spec, "option")
    if (reason := _reason_against(template)) is not None:
        raise OptionError(f"--response-template {path}: transformers cannot parse with it: {reason}")
    return template


def _reason_against(template: ResponseTemplate) -> str | None:
    """Return why transformers cannot parse with a template; None if it can."""
    if not isinstance(template.spec, dict):
        return "a template is an object"
    try:
        template.parser("")
    except (KeyError, TypeError, ValueError) as error:
        return brief(error)
    return None


def mark_texts(field: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the texts of a field's mark, ``open`` or ``close``, each of which is the whole mark.

    A pattern that is a text with optional space around it counts as one.
    """
    if (value := field.get(name)) is not None:
        return (value,) if isinstance(value, str) else tuple(value)
    text, rest = literal_begin(field.get(f"{name}_pattern", ""))
    return (text,) if text and re.fullmatch(r"(\\s|\\n)[*?]|", rest) else ()


def literal_begin(pattern: str) -> tuple[str, str]:
    """Return the text with which all matches of a pattern begin, after optional space, and the rest of it."""
    rest = re.sub(r"^(\\s|\\n)[*?]", "", pattern)
    text = ""
    while rest and "|" not in re.sub(r"\\.|\(.*?\)", "", pattern):
        match = re.match(r"\\([^\w\s])|([^\\.^$*+?{}\[\]|()])", rest)
        if match is None or re.match(r"[*?{]", rest[match.end() :]):  # it may be left out
            break
        text += match[1] or match[2]
        rest = rest[match.end() :]
    return text, rest
