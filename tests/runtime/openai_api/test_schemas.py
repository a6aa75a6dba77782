"""Requests of clients: what is understood, what is refused, and what asks for nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pydantic = pytest.importorskip("pydantic")

from shardconv_runtime.openai_api.chat_request import ChatRequest  # noqa: E402
from shardconv_runtime.openai_api.schemas import CompletionRequest, Sampling  # noqa: E402

DEFAULTS = Sampling(0.7, 0.9, 20, 0.1)


def completion(**fields: Any) -> CompletionRequest:
    """As it comes: through JSON."""
    return CompletionRequest.model_validate(json.loads(json.dumps({"prompt": "x"} | fields)))


def test_what_is_not_said() -> None:
    request = completion()
    assert (request.limit, request.stops, request.stream) == (None, (), False)
    assert request.sampling(DEFAULTS) == DEFAULTS


def test_what_is_said() -> None:
    """Whole numbers are numbers, null is nothing, and so is what asks for nothing."""
    request = completion(
        max_tokens=5,
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=0,
        stop="x",
        stream=True,
        n=1,
        seed=None,
        user="me",
    )
    assert request.sampling(DEFAULTS) == Sampling(0, 1, -1, 0)
    assert (request.limit, request.stops, request.stream) == (5, ("x",), True)
    assert completion(max_completion_tokens=6).limit == 6


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": 129},
        {"seed": 0.5},
        {"logprobs": 21},
        {"tools": [{}]},
        {"presence_penalty": 2.5},
        {"repetition_penalty": 0},
        {"repetition_penalty": 5e-324},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"1": 101}},
        {"response_format": {"type": "yaml"}},
        {"never_heard_of": 1},
        {"max_tokens": 0},
        {"max_tokens": 2.9},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": 2},
        {"top_k": 0.5},
        {"stop": [""]},
        {"stop": {}},
        {"stop_token_ids": [-1]},
        {"stream": "yes"},
        {"stream_options": []},
        {"prompt": [1, 2.5]},
    ],
)
def test_what_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError) as error:
        completion(**fields)
    found = error.value.errors()[0]
    assert next(iter(fields)) in (*found["loc"], found.get("ctx", {}).get("parameter"))


def test_prompts() -> None:
    """One or several, of text or of ids."""

    def count(text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(text)]}

    assert completion(prompt="abc").token_ids(count) == [[3]]
    assert completion(prompt=["a", "bc"]).token_ids(count) == [[1], [2]]
    assert completion(prompt=[3, 4]).token_ids(None) == [[3, 4]]
    assert completion(prompt=[[3, 4], [5]]).token_ids(None) == [[3, 4], [5]]
    assert completion(prompt=[]).token_ids(None) == [[]]


def test_how_tokens_are_drawn() -> None:
    assert Sampling(0, 0.5, 7).is_greedy
    assert Sampling(1e-40).is_greedy
    drawn = Sampling(2, 1, 0)
    assert not drawn.is_greedy
    assert drawn.warping == (2.0, 0, 1.0, 0.0)
    assert all(type(drawn.warping[index]) is float for index in (0, 2, 3))
    request = completion(logit_bias={"5": -100}, seed=3, logprobs=2, presence_penalty=1, frequency_penalty=-2)
    assert request.sampling(DEFAULTS) == replace(
        DEFAULTS,
        logit_bias=((5, -100.0),),
        seed=3,
        num_logprobs=2,
        presence_penalty=1.0,
        frequency_penalty=-2.0,
    )
    assert request.sampling(DEFAULTS).changes_scores
    assert not DEFAULTS.changes_scores


class Template:
    """A tokenizer that gives back what its template got."""

    chat_template = "any"

    def apply_chat_template(self, messages: Any, tools: Any, **options: Any) -> dict[str, Any]:
        self.got = messages, tools
        return {"input_ids": [1]}


def test_messages_reach_the_template_as_it_expects_them() -> None:
    """Arguments of calls are objects, and fields that are null are left out; all else is unchanged."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = Template()
    request = ChatRequest.model_validate({"messages": messages, "tools": tools, "tool_choice": "auto"})
    assert request.token_ids(template) == [[1]]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    silent = {"role": "assistant", "content": None}
    assert template.got == ([messages[0] | {"content": "ab"}, calling, calling, silent, messages[4]], tools)
    request = ChatRequest.model_validate({"messages": messages, "tools": tools, "tool_choice": "none"})
    request.token_ids(template)
    assert template.got[1] is None


@pytest.mark.parametrize("arguments", ["", "[1]", '{"a": ', None])
def test_arguments_that_are_no_object_reach_the_template_as_they_are(arguments: Any) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}, 3]
    template = Template()
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    ChatRequest.model_validate({"messages": messages}).token_ids(template)
    assert template.got[0] == [{"role": "assistant", "content": "", "tool_calls": calls}]


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user", "content": 3}], ["hi"], None, "hi"])
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(pydantic.ValidationError):
        ChatRequest.model_validate({"messages": messages})
