"""Calls of tools and reasoning in chats, as OpenAI's client sees them; the model says what it is told to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from response_shapes import SHAPES

pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

import openai
from scripted_server import Scripted, scripted

TEMPLATE = SHAPES["content without a mark"].template
AT = {"at": {"type": "string"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
    for name in ("look", "nod")
]
LOOK = '<tool>{"name": "look", "arguments": {"at": "ä"}}</tool>'
NOD = '<tool>{"name": "nod"}</tool>'
HELLO = [{"role": "user", "content": "hi"}]


def chat(server: Scripted, **options: Any) -> Any:
    """A whole answer."""
    asked = {"model": "tiny", "messages": HELLO, "tools": TOOLS} | options
    return asyncio.run(server.client.chat.completions.create(**asked))


def chunks(server: Scripted, **options: Any) -> list[Any]:
    """The pieces of an answer."""

    async def collect() -> list[Any]:
        asked = {"model": "tiny", "messages": HELLO, "tools": TOOLS} | options
        return [each async for each in await server.client.chat.completions.create(**asked, stream=True)]

    return asyncio.run(collect())


def test_a_whole_answer() -> None:
    answer = chat(scripted([f"<think> a b </think>Look: {LOOK}\n{NOD}"], TEMPLATE))
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning_content) == ("Look:", "a b")
    first, second = choice.message.tool_calls
    assert [call.type for call in (first, second)] == ["function"] * 2
    assert (first.function.name, first.function.arguments) == ("look", '{"at": "ä"}')
    assert (second.function.name, second.function.arguments) == ("nod", "{}")
    assert len({first.id, second.id}) == 2
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("<think> a b </think>") - 6


def test_content_is_null_beside_calls_only() -> None:
    assert chat(scripted([LOOK], TEMPLATE)).choices[0].message.content is None
    silent = chat(scripted([""], TEMPLATE)).choices[0]
    assert (silent.message.content, silent.message.tool_calls, silent.finish_reason) == ("", None, "stop")


def test_a_stream() -> None:
    """Each call has its index, id, type and name once; the end is a piece of its own, and nothing is null."""
    pieces = chunks(
        scripted([f"<think>a</think>b{LOOK}{NOD}"], TEMPLATE), stream_options={"include_usage": True}
    )
    choices = [piece.choices[0] for piece in pieces[:-1]]
    deltas = [choice.delta.model_dump(exclude_unset=True) for choice in choices]
    assert deltas[0] == {"role": "assistant", "reasoning_content": "a"}
    assert deltas[1] == {"content": "b"}
    calls = [delta["tool_calls"][0] for delta in deltas[2:4]]
    assert [call["index"] for call in calls] == [0, 1]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert [call["function"] for call in calls] == [
        {"name": "look", "arguments": '{"at": "ä"}'},
        {"name": "nod", "arguments": "{}"},
    ]
    assert deltas[2].keys() == {"tool_calls"}
    assert deltas[4:] == [{}]
    assert [choice.finish_reason for choice in choices] == [None] * 4 + ["tool_calls"]
    assert pieces[-1].usage.completion_tokens_details.reasoning_tokens == len("<think>a</think>") - 6


def test_the_clients_helper_for_streams() -> None:
    async def collect() -> Any:
        client = scripted([f"b{LOOK}{NOD}"], TEMPLATE).client
        async with client.chat.completions.stream(model="tiny", messages=HELLO, tools=TOOLS) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    message = asyncio.run(collect()).choices[0].message
    assert message.content == "b"
    assert [call.function.arguments for call in message.tool_calls] == ['{"at": "ä"}', "{}"]


def test_several_answers() -> None:
    pieces = chunks(scripted([f"a{LOOK}", "b"], TEMPLATE), n=2)
    ends = {piece.choices[0].index: piece.choices[0].finish_reason for piece in pieces}
    assert ends == {0: "tool_calls", 1: "stop"}


def test_a_call_that_is_cut_off() -> None:
    """The calls before it are there, its text is content, and the reason is the length."""
    for streams in (False, True):
        server = scripted([LOOK + NOD], TEMPLATE)
        limit = len(LOOK) + len('<tool>{"name"')
        if not streams:
            (choice,) = chat(server, max_tokens=limit).choices
            assert [call.function.name for call in choice.message.tool_calls] == ["look"]
            assert (choice.message.content, choice.finish_reason) == ('{"name"', "length")
            continue
        pieces = [piece.choices[0] for piece in chunks(server, max_tokens=limit)]
        assert "".join(piece.delta.content or "" for piece in pieces) == '{"name"'
        assert pieces[-1].finish_reason == "length"


@pytest.mark.parametrize("streams", [False, True])
def test_one_call_at_a_time(streams: bool) -> None:
    """The answer ends after it, and its request is canceled."""
    server = scripted([f"{LOOK}{NOD} and so on"], TEMPLATE)
    if streams:
        pieces = [piece.choices[0] for piece in chunks(server, parallel_tool_calls=False)]
        assert [len(piece.delta.tool_calls or ()) for piece in pieces] == [1, 0]
        assert pieces[-1].finish_reason == "tool_calls"
    else:
        (choice,) = chat(server, parallel_tool_calls=False).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["look"]
        assert choice.finish_reason == "tool_calls"
    assert len(server.manager.canceled) == 1


@pytest.mark.parametrize("options", [{"tools": openai.NOT_GIVEN}, {"tools": []}, {"tool_choice": "none"}])
def test_without_tools_there_are_no_calls(options: dict[str, Any]) -> None:
    server = scripted([f"<think>a</think>b{LOOK}"], TEMPLATE)
    (choice,) = chat(server, **options).choices
    assert choice.message.tool_calls is None
    assert (choice.message.content, choice.message.reasoning_content) == (f"b{LOOK}", "a")
    assert choice.finish_reason == "stop"
    assert server.tokenizer.seen[0][1] is None


@pytest.mark.parametrize(
    ("begin", "is_reasoning"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_a_schema_where_the_prompt_has_begun_the_answer(begin: str, is_reasoning: bool) -> None:
    """Only open reasoning has to end before the answer follows its schema."""
    pytest.importorskip("xgrammar")

    class Grammars:
        failures: dict[str, str] = {}  # noqa: RUF012
        require = None

        async def awaited(self, *_: Any) -> bytes:
            return b"compiled"

    reasoning = {"open": "<think>", "close_pattern": r"</think>\s*"}
    template = {**TEMPLATE, "fields": {**TEMPLATE["fields"], "reasoning_content": reasoning}}
    grammars: Any = Grammars()
    server = scripted(
        ["so</think>{}" if is_reasoning else "{}"], template, grammars=grammars, compiler_calls=grammars
    )
    server.tokenizer.chat_template = "{{ messages }} {{ begin }}"
    body = {
        "response_format": {"type": "json_object"},
        "extra_body": {"chat_template_kwargs": {"begin": begin}},
    }
    message = chat(server, tools=[], **body).choices[0].message
    assert message.content == "{}"
    constraint = server.manager.asked[0]["sampling"].constraint.text
    tag = json.loads(constraint)["format"]["elements"][0]
    assert (tag["type"], tag.get("begin")) == (("tag", "") if is_reasoning else ("optional", None))


def test_answers_have_their_ids_in_a_header() -> None:
    answer = chat(scripted(["a"], TEMPLATE))
    assert answer._request_id == answer.id


def test_without_a_template_there_is_text() -> None:
    server = scripted([f"<think>a</think>{LOOK}"])
    (choice,) = chat(server).choices
    assert choice.message.content == f"<think>a</think>{LOOK}"
    assert "".join(piece.choices[0].delta.content for piece in chunks(scripted(["ab"]))) == "ab"

    async def source(server: Scripted) -> Any:
        return (await server.client.models.retrieve("tiny")).response_template

    assert asyncio.run(source(server)) is None
    assert asyncio.run(source(scripted([], TEMPLATE))) == "option"


def test_two_steps() -> None:
    """A tool is called, and its result goes back with the message that the client got."""
    server = scripted([LOOK, "It is ä."], TEMPLATE)
    message = chat(server).choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": json.loads(call.function.arguments)["at"]}
    answer = chat(server, messages=[*HELLO, message, result])
    assert answer.choices[0].message.content == "It is ä."
    shown = server.tokenizer.seen[1][0][1]
    assert shown["content"] == ""
    assert shown["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "ä"}}
    assert shown.keys() == {"role", "content", "tool_calls"}


def test_fields_that_do_not_change_the_answer() -> None:
    nothing = {"prompt_cache_key": "a", "safety_identifier": "b", "service_tier": "auto", "store": True}
    assert chat(scripted(["a"], TEMPLATE), **nothing).choices[0].message.content == "a"


def test_the_effort_is_a_variable_of_the_chat_template() -> None:
    server = scripted(["a"], TEMPLATE)
    with pytest.raises(openai.BadRequestError, match="takes no reasoning_effort"):
        chat(server, reasoning_effort="low")
    server.tokenizer.chat_template = "{{ messages }} {{ reasoning_effort }}"
    assert chat(server, reasoning_effort="low").choices[0].message.content == "a"
    assert server.tokenizer.options[-1]["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_tools_that_are_none(options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(scripted(["a"], TEMPLATE), **options)
    assert error.value.param == parameter
