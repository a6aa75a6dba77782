"""A client's arguments for the chat template: the template's own variables, and no option of its rendering.

- Another template, which may loop: https://github.com/vllm-project/vllm/pull/25794,
  https://github.com/NVIDIA/Megatron-LM/pull/6818, https://github.com/vllm-project/vllm/issues/52025
- Long texts held the loop: https://github.com/vllm-project/vllm/issues/24910
- Arguments that did nothing: https://github.com/ai-dynamo/dynamo/pull/11729
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from forked import Forked
from hostile_requests import ARGUMENTS, letters

pytest.importorskip("uvicorn")

from shardconv_runtime.openai_api.chat_request import ChatRequest
from shardconv_runtime.openai_api.schemas import BadRequest, CompletionRequest
from shardconv_runtime.serving import server
from shardconv_runtime.serving.bounded_calls import BoundedCalls, ForkServer
from shardconv_runtime.serving.grammars import prepare_calls
from shardconv_runtime.serving.prompts import prompt_ids, require_template_variables, token_ids

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**arguments: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": MESSAGES, "chat_template_kwargs": arguments})


@pytest.fixture(scope="module")
def calls() -> Iterator[BoundedCalls]:
    fork_server = ForkServer()
    fork_server.prepare(prepare_calls, letters(), 0, None)
    yield BoundedCalls(fork_server, 0.5, 2, keeps_processes=True)
    fork_server.close()


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_what_is_no_variable_of_the_template_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(sorted(arguments)))) as error:
        prompt_ids(chat(**arguments), letters())
    assert error.value.parameter == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "hi a"),
        ({"note": "to you"}, "hi to youa"),
        ({"add_generation_prompt": False}, "hi "),
        ({"loops": 2, "add_generation_prompt": True}, "0011hi a"),
    ],
)
def test_variables_of_the_template_have_their_effect(
    calls: BoundedCalls, arguments: dict[str, Any], text: str
) -> None:
    (ids,) = asyncio.run(token_ids(chat(**arguments), letters(), calls))
    assert letters().decode(ids) == text


def test_rendering_is_bounded_and_beside_the_loop(calls: BoundedCalls) -> None:
    async def both() -> float:
        longest, looping = 0.0, asyncio.ensure_future(token_ids(chat(loops=90_000), letters(), calls))
        while not looping.done():
            begin = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - begin)
        with pytest.raises(BadRequest, match=r"more than 0\.5 s"):
            await looping
        return longest

    assert asyncio.run(both()) < 0.4


def test_prompts_of_texts_and_of_ids(calls: BoundedCalls) -> None:
    for prompt in ("ab", ["ab", "c", ""], [5, 6], [[5], [6, 7]]):
        request = CompletionRequest.model_validate({"prompt": prompt})
        want = prompt_ids(request, letters())
        assert asyncio.run(token_ids(request, letters(), calls)) == want


def test_variables_that_a_template_sets_itself() -> None:
    """As templates of releases do: with a default, in a namespace, in a macro, in a block of transformers."""
    text = (
        "{%- if not date_string is defined %}{% set date_string = 'today' %}{% endif -%}"
        "{% set ns = namespace(found=false) %}{% macro shown(x) %}{{ x }}{% endmacro %}"
        "{% for m in messages %}{% generation %}{{ shown(m.content) }}{% endgeneration %}"
        "{% if m.role == 'x' %}{{ raise_exception('no') }}{% break %}{% endif %}{% endfor %}"
        "{% if enable_thinking is defined and enable_thinking is false %}{{ strftime_now('%Y') }}{% endif %}"
    )
    tokenizer = letters()
    tokenizer.chat_template = text
    require_template_variables({"date_string": "today", "enable_thinking": False}, tokenizer, False)
    for name in ("ns", "m", "shown", "x", "namespace", "raise_exception", "strftime_now", "messages"):
        with pytest.raises(BadRequest, match=f"no {name} from.*takes date_string, enable_thinking"):
            require_template_variables({name: 1}, tokenizer, False)


def test_a_rank_that_is_told_to_end_does_so_in_time() -> None:
    """Orchestrators kill after 30 s."""

    def busy() -> None:
        server.END_S = 0.3
        told = server.leave_signals_to_rank_0()
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            time.sleep(0.01)
        assert told

    begin = time.monotonic()
    child = Forked(busy)
    _, errors = child.communicate(30)
    assert child.returncode == 1
    assert "did not end in 0.3 s" in errors
    assert time.monotonic() - begin < 10
    assert server.DRAIN_S < server.END_S <= 24
