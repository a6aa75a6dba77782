"""From the text of an answer to a message with reasoning, content and calls of tools, piece by piece."""

from __future__ import annotations

import bisect
import contextlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .response_templates import CALLS, CONTENT, REASONING_FIELDS


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        arguments: JSON, as clients expect it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class MessageDelta:
    """The new parts of a message.

    Attributes:
        others: fields of the template that OpenAI's API does not have; with the last delta.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is new."""
        return not (self.content or self.reasoning or self.calls or self.others)

    def __add__(self, later: MessageDelta) -> MessageDelta:
        return MessageDelta(
            self.content + later.content,
            self.reasoning + later.reasoning,
            self.calls + later.calls,
            {**self.others, **later.others},
        )


class MessageParser:
    """The message of one answer, as its text comes.

    All deltas add up to the result of ``parse_response`` for the whole text, with two differences. If a
    field of text comes in several parts, ``parse_response`` keeps the last one; here they are joined. If a
    call is cut off or cannot be read, the text from there on is content, and there is no error.

    Args:
        make_parser: returns transformers' parser of the answer, at its beginning.
        fields: the fields of the template.
    """

    def __init__(self, make_parser: Callable[[], Any], fields: Mapping[str, Mapping[str, Any]]) -> None:
        self._make_parser = make_parser
        self._fields = fields
        self._parser = make_parser()
        self._message = _Message(fields)
        self._message.add(self._parser.initial_events)
        self._text = ""
        self._num_read = 0
        """Characters that the parser has read without an error."""
        self._is_broken = False

    @property
    def open_field(self) -> str | None:
        """Return the field of the template to which the next text belongs; None if that is not known yet."""
        return self._message.open_field

    @property
    def is_reasoning(self) -> bool:
        """Return whether the next text belongs to the reasoning."""
        return self.open_field in REASONING_FIELDS

    def push(self, text: str) -> MessageDelta:
        """Return the parts of the message that more text adds."""
        if self._is_broken:
            return MessageDelta(content=text)
        self._num_read = len(self._text)
        self._text += text
        try:
            self._message.add(self._parser.feed(text))
        except Exception:  # of functions that the template chooses, with text of a model
            return self._break()
        return self._message.take()

    def end(self, end_text: str = "", *, is_cut: bool) -> MessageDelta:
        """Return the parts of the message that the end of the text adds.

        Args:
            end_text: the text of the token with which the model has ended it. It may be a part of a mark;
                otherwise it is not a part of the message.
            is_cut: the text ends here for another reason than that the model has ended it.
        """
        if self._is_broken:
            return MessageDelta()
        if end_text and (delta := self._with_end(end_text)) is not None:
            return delta
        self._num_read = len(self._text)
        if is_cut and self._message.open_field == CALLS:
            return self._break()
        try:
            message, events = self._parser.finalize()
            # A mark at the very end opens a call only now.
            self._message.add([each for each in events if not is_cut or each["field"] != CALLS])
        except Exception:  # as above
            return self._break()
        return replace(self._message.take(), others=_others(message))

    def _with_end(self, end_text: str) -> MessageDelta | None:
        """Return the last parts of a message that goes on with a text; None if it is not in a mark."""
        parser, message = self._make_parser(), _Message(self._fields)
        try:
            message.add(parser.initial_events + parser.feed(self._text + end_text))
            values, events = parser.finalize()
            message.add(events)
        except Exception:  # of functions that the template chooses
            return None
        message.skip(self._message)
        delta = replace(message.take(), others=_others(values))
        shown = [delta.content, delta.reasoning, _as_text(delta.others), *(c.arguments for c in delta.calls)]
        return None if any(end_text in text for text in shown) else delta

    def _break(self) -> MessageDelta:
        """Stop parsing; return the new parts before one that cannot be read, and its text as content."""
        self._is_broken = True
        # Transformers' parser raises an error without the events before it. Another one reads the last piece
        # by characters.
        parser, message, position = self._make_parser(), _Message(self._fields), self._num_read
        message.add(parser.initial_events)
        try:
            message.add(parser.feed(self._text[:position]))
            for character in self._text[position:]:
                message.add(parser.feed(character))
                position += 1
        except Exception:  # the one that came before
            pass
        name, rest = message.open_field, ""
        if name is not None and name not in message.plain_fields:
            rest = self._text[self._end_of_mark(name, position) :]
        message.skip(self._message)
        delta = message.take()
        return MessageDelta(delta.content + rest, delta.reasoning, delta.calls)

    def _end_of_mark(self, name: str, seen_at: int) -> int:
        """Return where the mark ends that opens the part of a field at a position.

        The parser sees some marks later, as more text could make them longer. At the end of a text it sees
        all of them.
        """

        def num_opened(end: int) -> int:
            parser = self._make_parser()
            events = parser.initial_events + parser.feed(self._text[:end])
            is_open = bool(events) and events[-1]["type"] != "region_close" and events[-1]["field"] == name
            with contextlib.suppress(Exception):  # of the part that is open, without its text
                return _num_opened(events + parser.finalize()[1], name)
            return _num_opened(events, name) + (not is_open)

        return bisect.bisect_left(range(seen_at), num_opened(seen_at), key=num_opened)


def _others(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message that OpenAI's API does not have."""
    known = {"role", CONTENT, CALLS, *REASONING_FIELDS}
    return {name: value for name, value in message.items() if name not in known}


def _num_opened(events: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(event["type"] == "region_open" and event["field"] == name for event in events)


class _Message:
    """A message so far, from the events of transformers' parser.

    Attributes:
        open_field: the field that the parser is in.
        plain_fields: fields whose text is a part of the message as it comes.
    """

    def __init__(self, fields: Mapping[str, Mapping[str, Any]]) -> None:
        self.open_field: str | None = None
        of_text = {name: each for name, each in fields.items() if name in (CONTENT, *REASONING_FIELDS)}
        self.plain_fields = frozenset(name for name, each in of_text.items() if _is_plain(each))
        self._texts = {name: _FieldText(each, name in self.plain_fields) for name, each in of_text.items()}
        self._calls: list[ToolCall] = []
        self._num_taken = 0

    def add(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Add events of the parser; ``ValueError`` for a call without a name."""
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_close" and name == CALLS:
                self._calls += [_call(value) for value in _flat(event["value"])]
            elif name in self._texts:
                if kind == "region_open":
                    self._texts[name].begin()
                elif kind == "region_chunk" and name in self.plain_fields:
                    self._texts[name].add(event["text"])
                elif kind == "region_close" and name not in self.plain_fields:
                    self._texts[name].add(_as_text(event["value"]))
            self.open_field = None if kind == "region_close" else name

    def take(self) -> MessageDelta:
        """Return the parts that are new since the last call."""
        calls = tuple(self._calls[self._num_taken :])
        self._num_taken = len(self._calls)
        texts = {name: text.take() for name, text in self._texts.items()}
        reasoning = "".join(texts.get(name, "") for name in REASONING_FIELDS)
        return MessageDelta(texts.get(CONTENT, ""), reasoning, calls)

    def skip(self, other: _Message) -> None:
        """Leave out the parts that were taken of another message that begins alike."""
        for name, text in self._texts.items():
            text.skip(other._texts[name])
        self._calls[: other._num_taken] = other._calls[: other._num_taken]  # with their ids
        self._num_taken = other._num_taken


class _FieldText:
    """The text of a field, without the space around it unless the template says that it counts."""

    def __init__(self, settings: Mapping[str, Any], is_plain: bool) -> None:
        self._strips = is_plain and settings.get("content_args", {}).get("strip", True)
        self._separator = settings.get("join")
        self._num_parts = 0
        self._has_begun = False
        """Other text than space has come."""
        self._space = ""
        """Space at the end, which counts if text follows."""
        self._new: list[str] = []
        self._num_taken = 0

    def begin(self) -> None:
        """Begin a part of the field; parts without a separator are one text."""
        if self._separator is not None:
            if self._num_parts:
                self._new.append(self._separator)
            self._has_begun, self._space = False, ""
        self._num_parts += 1

    def add(self, text: str) -> None:
        """Add text to the part."""
        if not self._strips:
            self._new.append(text)
            return
        text = self._space + text if self._has_begun else text.lstrip()
        shown = text.rstrip()
        self._has_begun = self._has_begun or bool(shown)
        self._space = text[len(shown) :]
        self._new.append(shown)

    def take(self) -> str:
        """Return the parts that are new since the last call."""
        text = "".join(self._new)
        self._new = []
        self._num_taken += len(text)
        return text

    def skip(self, other: _FieldText) -> None:
        """Leave out as much as was taken of another text."""
        self._new = ["".join(self._new)[other._num_taken :]]


def _is_plain(settings: Mapping[str, Any]) -> bool:
    return settings.get("content", "text") == "text" and settings.get("transform") is None


def _flat(value: Any) -> list[Any]:
    """Return calls, of which a template may find several in one place."""
    return [call for item in value for call in _flat(item)] if isinstance(value, list) else [value]


def _call(value: Any) -> ToolCall:
    """Return a call of a parsed message; ``ValueError`` if it has no name."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a call without the name of a function")
    return ToolCall(f"call_{uuid.uuid4().hex}", function["name"], _as_json(function.get("arguments", {})))


def _as_json(arguments: Any) -> str:
    """Return arguments as JSON; some models write them as a text that is JSON already."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
