"""Messages that are parsed out of answers: in whatever pieces they come, they are those of transformers."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import pytest
from response_shapes import CALL, SHAPES
from shardconv_runtime.openai_api.message_parser import MessageDelta, MessageParser
from shardconv_runtime.openai_api.response_templates import ResponseTemplate
from transformers.utils.chat_parsing import parse_response

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}},
    }
]


def message_parser(template: dict[str, Any], prompt: str = "", tools: Any = ()) -> MessageParser:
    own = ResponseTemplate(template, "option")
    return MessageParser(partial(own.parser, prompt, tools), own.fields)


def message(parser: MessageParser, pieces: list[str], *, is_cut: bool = False) -> MessageDelta:
    """The sum of all deltas."""
    deltas = [parser.push(piece) for piece in pieces]
    return sum([*deltas, parser.end(is_cut=is_cut)], MessageDelta())


def comparable(delta: MessageDelta) -> dict[str, Any]:
    calls = [(call.name, json.loads(call.arguments)) for call in delta.calls]
    return {"content": delta.content, "reasoning": delta.reasoning, "calls": calls}


def parsed_by_transformers(text: str, template: dict[str, Any], prompt: str) -> dict[str, Any]:
    found = parse_response(text, template, prefix=prompt, tools=TOOLS)
    reasoning = found.get("reasoning_content", found.get("thinking", ""))
    functions = [call["function"] for call in found.get("tool_calls", [])]
    calls = [(each["name"], each.get("arguments", {})) for each in functions]
    return {"content": found.get("content", ""), "reasoning": reasoning, "calls": calls}


@pytest.mark.parametrize("name", SHAPES)
def test_pieces_add_up_to_the_message_of_transformers(name: str) -> None:
    """Of every cut into two, of single characters, and of random pieces."""
    shape = SHAPES[name]
    text = shape.answer
    want = parsed_by_transformers(text, shape.template, shape.prompt)
    assert [name for name, _ in want["calls"]] == ["look", "nod"]
    assert want["reasoning"]
    draw = random.Random(0)
    cuts = [[n] for n in range(len(text))] + [list(range(len(text)))]
    cuts += [sorted(draw.sample(range(len(text)), 8)) for _ in range(100)]
    for cut in cuts:
        ends = [*cut, len(text)]
        pieces = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        parser = message_parser(shape.template, shape.prompt, TOOLS)
        assert comparable(message(parser, pieces)) == want, pieces


@pytest.mark.parametrize("name", SHAPES)
def test_a_text_that_is_cut_off_has_the_calls_before(name: str) -> None:
    """Wherever that is: no call that is not complete."""
    shape = SHAPES[name]
    whole = message(message_parser(shape.template, shape.prompt, TOOLS), [shape.answer])
    calls = comparable(whole)["calls"]
    counts = []
    for end in range(len(shape.answer)):
        delta = message(
            message_parser(shape.template, shape.prompt, TOOLS), [*shape.answer[:end]], is_cut=True
        )
        found = comparable(delta)
        assert found["calls"] == calls[: len(found["calls"])]
        counts.append(len(found["calls"]))
    assert counts == sorted(counts)


@pytest.mark.parametrize("pieces", [1, 1000])
@pytest.mark.parametrize(
    "call", ['{"name": "look", "arguments": {"at": }}', '{"nam": "look"}', '["look"]', '{"name": 1}', ""]
)
def test_a_call_that_cannot_be_read_is_content(call: str, pieces: int) -> None:
    """After the calls that can; the rest of the answer is not parsed."""
    template = SHAPES["content without a mark"].template
    good = '<tool>{"name": "nod", "arguments": {}}</tool>'
    text = f"<think>a</think>b{good} <tool>{call}</tool> c {good}"
    delta = message(message_parser(template), [text] if pieces == 1 else [*text])
    assert [each.name for each in delta.calls] == ["nod"]
    assert (delta.reasoning, delta.content) == ("a", f"b{call}</tool> c {good}")
    assert len({each.id for each in delta.calls}) == 1


CALL_FIELD = {"open": "<c>", "content": "json", "transform": CALL, "repeats": True}


@pytest.mark.parametrize("close", [{"close_pattern": r"\}<done>\s*"}, {"close": "<done>"}, {}])
def test_the_end_of_an_answer_may_end_a_call(close: dict[str, str]) -> None:
    """The text of the last token belongs to a mark, or it is not a part of the message."""
    field = {**CALL_FIELD, **close}
    template = {"start_anchor": "<bot>", "fields": {"tool_calls": field, "content": {}}}
    written = '{"name": "f", "arguments": {"a": 1}}' + ("}" if "close_pattern" in close else "")
    parser = message_parser(template)
    delta = parser.push(f"Hi <c>{written}") + parser.end("<done>", is_cut=False)
    assert [(call.name, call.arguments) for call in delta.calls] == [("f", '{"a": 1}')]
    assert delta.content == "Hi"


def test_the_end_of_an_answer_is_not_content() -> None:
    template = {"start_anchor": "<bot>", "fields": {"content": {}, "sources": {"open": "<s>"}}}
    parser = message_parser(template)
    delta = parser.push("Hi \n") + parser.end("<done>", is_cut=False)
    assert (delta.content, delta.others) == ("Hi", {})
    parser = message_parser(template)
    delta = parser.push("Hi <s>x") + parser.end("<done>", is_cut=False)
    assert (delta.content, delta.others) == ("Hi", {"sources": "x"})


def test_content_in_several_parts_is_joined() -> None:
    """``parse_response`` would keep the last part, which may be a line break."""
    template = SHAPES["content without a mark"].template
    text = ' Hi \n<tool>{"name": "nod"}</tool> there <think>x</think>\n'
    for pieces in ([text], [*text]):
        assert message(message_parser(template), pieces).content == "Hi there"


def test_values_that_are_not_text() -> None:
    """Content that is parsed, arguments that are JSON already, and fields that the API does not have."""
    template = {
        "start_anchor": "<bot>",
        "fields": {
            "content": {"open": "<n>", "close": "</n>", "content": "json"},
            "tool_calls": {
                "open": "<c>",
                "close": "</c>",
                "content": "json",
                "transform": CALL,
                "repeats": True,
            },
            "sources": {"open": "<s>", "close": "</s>", "repeats": True},
        },
    }
    call = json.dumps({"name": "f", "arguments": '{"a": 1}'})
    delta = message(message_parser(template), [*f"<n>[1]</n><c>{call}</c><s>a</s><s>b</s>"])
    assert delta.content == "[1]"
    assert delta.calls[0].arguments == '{"a": 1}'
    assert delta.others == {"sources": ["a", "b"]}


class Characters:
    """A tokenizer whose tokens are characters."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("prompt", "begin"),
    [
        ("hi<bot>\n<think>\n", "think"),
        ("<bot>\n<think>" + "x" * 600, "think"),
        ("no anchor", None),
        ("<bot>\n", ""),
    ],
)
def test_what_the_prompt_writes_of_the_answer(prompt: str, begin: str | None) -> None:
    """A prompt without the anchor is no part of the answer."""
    template = ResponseTemplate(SHAPES["content without a mark"].template, "option")
    text = template.begin_of_answer(Characters(), [*map(ord, prompt)])
    parser = MessageParser(partial(template.parser, text), template.fields)
    assert parser.is_reasoning == (begin == "think")
    assert parser.push("a").content == ("" if begin == "think" else "a")
