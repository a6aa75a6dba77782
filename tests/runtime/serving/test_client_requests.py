"""Requests of clients: what is understood, what is refused, and what asks for nothing."""

from __future__ import annotations

from typing import Any

import pytest
from shardconv_runtime.serving.client_requests import BadRequest, Sampling, Wanted, wanted

DEFAULTS = Sampling(0.7, 0.9, 20)


def test_what_is_not_said() -> None:
    assert wanted({}, DEFAULTS, is_chat=False) == Wanted(16, DEFAULTS, (), False, False)
    assert wanted({}, DEFAULTS, is_chat=True).max_new_tokens == 1024


def test_what_is_said() -> None:
    body = {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 1,
        "top_k": -1,
        "stop": "x",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "seed": None,
        "user": "me",
    }
    assert wanted(body, DEFAULTS, is_chat=False) == Wanted(5, Sampling(0, 1, 0), ("x",), True, True)
    assert wanted({"max_completion_tokens": 6}, DEFAULTS, is_chat=True).max_new_tokens == 6


@pytest.mark.parametrize(
    "body",
    [
        {"n": 2},
        {"seed": 1},
        {"logprobs": 3},
        {"tools": [{}]},
        {"presence_penalty": 0.5},
        {"never_heard_of": 1},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"temperature": "hot"},
        {"top_p": 2},
        {"stop": [""]},
        {"stop": {}},
        {"stream": "yes"},
        {"stream_options": []},
    ],
)
def test_what_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as error:
        wanted(body, DEFAULTS, is_chat=False)
    assert error.value.parameter == next(iter(body))


def test_how_tokens_are_drawn() -> None:
    assert Sampling(0, 0.5, 7).options(100) == {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    assert Sampling(2.0, 0.5, 0).options(100) == {"temperature": 2.0, "top_k": 100, "top_p": 0.5}
