"""``/v1/responses`` as OpenAI's client sees it; the model says what it is told to."""

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
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOLS = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("look", "nod")]
CALLS = '<tool>{"name": "look", "arguments": {"at": "ä"}}</tool><tool>{"name": "nod"}</tool>'


def respond(server: Scripted, **options: Any) -> Any:
    """A whole response."""
    return asyncio.run(
        server.client.responses.create(**{"model": "tiny", "input": "hi", "tools": TOOLS} | options)
    )


def events(server: Scripted, **options: Any) -> list[Any]:
    """The events of a response."""

    async def collect() -> list[Any]:
        asked = {"model": "tiny", "input": "hi", "tools": TOOLS} | options
        return [each async for each in await server.client.responses.create(**asked, stream=True)]

    return asyncio.run(collect())


def test_a_whole_response() -> None:
    response = respond(scripted([f"<think>a b</think>Look: {CALLS}"], TEMPLATE), instructions="be kind")
    assert (response.status, response.output_text) == ("completed", "Look:")
    reasoning, text, *calls = response.output
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert reasoning.content[0].text == "a b"
    assert text.content[0].type == "output_text"
    assert [(call.name, call.arguments) for call in calls] == [("look", '{"at": "ä"}'), ("nod", "{}")]
    assert len({item.id for item in response.output} | {call.call_id for call in calls}) == 6
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == len("a b</think>") + 1


def test_events() -> None:
    """Numbered, in the order that clients expect, and with the ids of the whole response at the end."""
    found = events(scripted([f"<think>a</think>bc{CALLS}"], TEMPLATE))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    of_item = ["response.output_item.added", "response.content_part.added"]
    of_end = ["response.content_part.done", "response.output_item.done"]
    of_call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert [event.type for event in found] == [
        "response.created",
        "response.in_progress",
        *of_item,
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        *of_end,
        *of_item,
        *["response.output_text.delta"] * 2,
        "response.output_text.done",
        *of_end,
        *of_call,
        *of_call,
        "response.completed",
    ]
    done = [event.item for event in found if event.type == "response.output_item.done"]
    begun = [event.item for event in found if event.type == "response.output_item.added"]
    assert found[-1].response.output == done
    assert [item.id for item in begun] == [item.id for item in done]
    assert [event.output_index for event in found if event.type == of_item[0]] == [0, 1, 2, 3]
    assert {event.response.id for event in found if hasattr(event, "response")} == {found[0].response.id}


def test_the_clients_helper_for_streams() -> None:
    async def collect() -> Any:
        client = scripted([f"b{CALLS}"], TEMPLATE).client
        async with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    response = asyncio.run(collect())
    assert response.output_text == "b"
    assert [item.name for item in response.output[1:]] == ["look", "nod"]


def test_two_steps() -> None:
    """The items of a response are input of the next one."""
    server = scripted([f"<think>a</think>b{CALLS}", "It is ä."], TEMPLATE)
    response = respond(server, instructions="be kind")
    items: list[Any] = [{"role": "user", "content": "hi"}, *response.output]
    for call in response.output[2:]:
        output = json.loads(call.arguments).get("at", "nothing")
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    assert respond(server, input=items, instructions="be kind").output_text == "It is ä."
    system, user, turn, *results = server.tokenizer.seen[1][0]
    assert (system, user) == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    )
    assert (turn["content"], turn["reasoning_content"]) == ("b", "a")
    functions = [call["function"] for call in turn["tool_calls"]]
    assert functions == [{"name": "look", "arguments": {"at": "ä"}}, {"name": "nod", "arguments": {}}]
    assert [result["content"] for result in results] == ["ä", "nothing"]
    assert [result["tool_call_id"] for result in results] == [call["id"] for call in turn["tool_calls"]]


def test_items_become_messages() -> None:
    server = scripted(["a"], TEMPLATE)
    call = {"type": "function_call", "call_id": "1", "name": "nod", "arguments": "{}"}
    items = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}],
        },
        {"type": "message", "role": "user", "content": "u"},
        call,
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        call,
        {"role": "assistant", "content": "next"},
    ]
    respond(server, input=items)
    shown = [(message["role"], message["content"]) for message in server.tokenizer.seen[0][0]]
    assert shown == [
        ("system", "xy"),
        ("user", "u"),
        ("assistant", ""),
        ("tool", "r"),
        ("assistant", "t"),
        ("assistant", "next"),
    ]


def test_a_response_that_is_cut_off() -> None:
    for response in (
        respond(scripted(["abcdef"], TEMPLATE), max_output_tokens=3),
        events(scripted(["abcdef"], TEMPLATE), max_output_tokens=3)[-1].response,
    ):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output_text == "abc"


def test_responses_of_text_only() -> None:
    assert respond(scripted(["ab"])).output_text == "ab"
    empty = respond(scripted([""], TEMPLATE))
    assert (empty.output_text, [item.type for item in empty.output]) == ("", ["message"])


@pytest.mark.parametrize(
    ("options", "parameter", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "send fewer"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "item_reference"),
        ({"input": []}, "input", "at least 1"),
        ({"tool_choice": "required"}, "tool_choice", "cannot be demanded"),
        ({"extra_body": {"nonsense": 1}}, "nonsense", "not permitted"),
        ({"model": "other"}, "model", "not served"),
    ],
)
def test_what_is_refused(options: dict[str, Any], parameter: str, message: str) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as error:
        respond(scripted(["a"], TEMPLATE, call_syntax="because"), **options)
    assert 400 <= error.value.status_code < 500
    assert error.value.param == parameter


def test_fields_that_ask_for_nothing() -> None:
    nothing = {
        "store": True,
        "include": [],
        "truncation": "disabled",
        "service_tier": "auto",
        "metadata": {"a": "b"},
    }
    response = respond(scripted(["a"], TEMPLATE), **nothing)
    assert (response.output_text, response.metadata, response.store) == ("a", {"a": "b"}, False)
