"""Requests of clients: what is understood, what is refused, and what asks for nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

pydantic = pytest.importorskip("pydantic")

from shardconv_runtime.serving.schemas import (  # noqa: E402
    BadRequest,
    ChatRequest,
    CompletionRequest,
    Sampling,
)

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
        {"n": 2},
        {"seed": 1},
        {"logprobs": 3},
        {"tools": [{}]},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
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


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]]])
def test_several_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest, match="prompt should be one text"):
        completion(prompt=prompt).token_ids(None)


def test_one_prompt_in_a_list() -> None:
    assert completion(prompt=["a"]).token_ids(lambda text: {"input_ids": [len(text)]}) == [1]
    assert completion(prompt=[[3, 4]]).token_ids(None) == [3, 4]


def test_how_tokens_are_drawn() -> None:
    greedy = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
    assert Sampling(0, 0.5, 7).options(100) == Sampling(1e-40, 0.5, 7).options(100) == greedy
    drawn = Sampling(2, 1, 0).options(100)
    assert drawn == {"temperature": 2.0, "top_k": 100, "top_p": 1.0, "min_p": 0.0}
    assert all(type(drawn[name]) is float for name in ("temperature", "top_p", "min_p"))


class Template:
    """A tokenizer that gives back what its template got."""

    chat_template = "any"

    def apply_chat_template(self, messages: Any, tools: Any, **options: Any) -> dict[str, Any]:
        self.got = messages, tools
        return {"input_ids": [1]}


def test_messages_reach_the_template_as_they_are() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = Template()
    request = ChatRequest.model_validate({"messages": messages, "tools": tools, "tool_choice": "auto"})
    assert request.token_ids(template) == [1]
    assert template.got == ([messages[0] | {"content": "ab"}, *messages[1:]], tools)


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user", "content": 3}], ["hi"], None, "hi"])
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(pydantic.ValidationError):
        ChatRequest.model_validate({"messages": messages})
