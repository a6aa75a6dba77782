"""The web application without a server and without ranks: a manager that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from scripted_server import Output, ScriptedManager
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.openai_api.schemas import Sampling, TokenLogprob
from shardconv_runtime.serving import answers
from shardconv_runtime.serving.answers import Served
from shardconv_runtime.serving.body_limit import BodyLimit
from shardconv_runtime.serving.endpoints import application
from shardconv_runtime.serving.request_sampling import default_sampling
from transformers import GenerationConfig


@dataclass
class Manager(ScriptedManager):
    """Answers with the tokens 1, 2, 3 ... up to the number that is asked for, or never ends."""

    script: list[str] = field(default_factory=list)
    is_endless: bool = False

    def is_running(self) -> bool:
        return self.failure is None

    def outputs(self, prompt: list[int], max_new_tokens: int) -> list[Output]:
        if prompt == [7]:
            raise ShardconvError("not this one")
        told = 1 if self.is_endless else max_new_tokens
        return [Output(list(range(1, n + 1)), n == max_new_tokens) for n in range(1, told + 1)]


class Tokenizer:
    """Words are numbers."""

    all_special_ids = (9,)
    chat_template = "any"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def apply_chat_template(self, messages: Any, **_: Any) -> dict[str, list[int]]:
        return self(" ".join(message["content"] for message in messages))

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<{token}>"

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(f"{token} " for token in tokens)


def served(manager: Manager, **options: Any) -> Served:
    return Served(manager, Tokenizer(), "tiny", 20, 16, 9, **options)  # type: ignore[arg-type]


async def call(
    app: Any, path: str, body: Any = None, *, key: str = "", leaves: bool = False
) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer; a client that leaves waits for none."""
    content = b"" if body is None else json.dumps(body).encode()
    given = [{"type": "http.request", "body": content, "more_body": False}]
    found: list[Any] = []
    headers = [(b"content-type", b"application/json"), (b"authorization", key.encode())]

    async def receive() -> Any:
        if given:
            return given.pop()
        await asyncio.sleep(0.05 if leaves else 60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        found.append(message)

    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("localhost", 80),
        "client": ("localhost", 1),
        "root_path": "",
        "asgi": {"version": "3.0"},
    }
    await asyncio.wait_for(app(scope, receive, send), 20)
    start = found[0]
    text = b"".join(message.get("body", b"") for message in found[1:]).decode()
    return start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, text


def get(app: Any, path: str, body: Any = None, **options: Any) -> tuple[int, dict[str, str], str]:
    return asyncio.run(call(app, path, body, **options))


def test_an_answer() -> None:
    app = application(served(manager := Manager()), Sampling(0.5, top_k=3))
    status, _, text = get(app, "/v1/completions", {"prompt": "4 5", "max_tokens": 3})
    found = json.loads(text)
    choice = found["choices"][0]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "1 2 3 ", "length")
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    (asked,) = manager.asked
    assert (asked["sampling"], asked["eos_token_id"]) == (Sampling(0.5, top_k=3), [9])


def test_several_prompts_and_answers() -> None:
    app = application(served(manager := Manager()), Sampling())
    body = {"prompt": ["4", "5 6"], "max_tokens": 2, "n": 2, "seed": 8}
    found = json.loads(get(app, "/v1/completions", body)[2])
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in found["choices"]} == {"1 2 "}
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert [asked["prompt"] for asked in manager.asked] == [[4], [4], [5, 6], [5, 6]]
    assert [asked["sampling"].seed for asked in manager.asked] == [8, 9, 8, 9]
    events = get(app, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})[
        2
    ]
    pieces = [json.loads(event[6:]) for event in events.split("\n\n")[:-2]]
    for index in range(4):
        mine = [
            piece["choices"][0]
            for piece in pieces
            if piece["choices"][:1] and piece["choices"][0]["index"] == index
        ]
        assert "".join(piece["text"] for piece in mine) == "1 2 "
        assert mine[-1]["finish_reason"] == "length"
    assert pieces[-1]["usage"] == found["usage"]
    status, _, text = get(app, "/v1/completions", {"prompt": ["4", "7"], "max_tokens": 2})
    assert (status, "not this one" in text) == (400, True)
    assert set(manager.output_router.result_handlers) == set()


class Processor(SimpleNamespace):
    """Has noted what it is given, for every request."""

    def watch(self, name: str) -> None:
        self.watched = name

    def forget(self, name: str) -> None:
        self.forgotten = name


def test_logprobs() -> None:
    entries = [TokenLogprob(n, -0.5 * n, ((n, -0.5 * n), (n + 1, -4.0))) for n in (1, 2, 3)]
    processor = Processor(failed=(), logprobs=defaultdict(lambda: entries))
    app = application(served(Manager(), processor=processor), Sampling())
    body = {"prompt": "4", "max_tokens": 3, "logprobs": 2}
    shown = json.loads(get(app, "/v1/completions", body)[2])["choices"][0]["logprobs"]
    assert shown["tokens"] == ["1 ", "2 ", "3 "]
    assert shown["token_logprobs"] == [-0.5, -1.0, -1.5]
    assert shown["top_logprobs"][1] == {"2 ": -1.0, "3 ": -4.0}
    assert shown["text_offset"] == [0, 2, 4]
    events = get(app, "/v1/completions", {**body, "stream": True})[2]
    pieces = [json.loads(event[6:])["choices"][0]["logprobs"] for event in events.split("\n\n")[:-2]]
    assert [piece["token_logprobs"] for piece in pieces] == [[-0.5], [-1.0], [-1.5]]
    assert [piece["text_offset"] for piece in pieces] == [[0], [2], [4]]
    chat = {
        "messages": [{"role": "user", "content": "4"}],
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 2,
    }
    (entry,) = json.loads(get(app, "/v1/chat/completions", chat)[2])["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("1 ", -0.5, [*b"1 "])
    assert [likely["logprob"] for likely in entry["top_logprobs"]] == [-0.5, -4.0]
    status, _, text = get(app, "/v1/chat/completions", {**chat, "logprobs": False})
    assert (status, json.loads(text)["error"]["param"]) == (400, "top_logprobs")
    assert processor.forgotten.startswith("cmpl-")
    status, _, text = get(application(served(Manager()), Sampling()), "/v1/completions", body)
    assert (status, json.loads(text)["error"]["param"]) == (400, "logprobs")


def test_logits_that_are_not_numbers_are_the_requests_error() -> None:
    class Everything(tuple[str, ...]):
        def __contains__(self, name: object) -> bool:
            return True

    processor = Processor(failed=Everything(), logprobs={})
    app = application(served(manager := Manager(), processor=processor), Sampling())
    status, _, text = get(app, "/v1/completions", {"prompt": "4", "max_tokens": 2})
    assert (status, "not numbers" in text) == (500, True)
    assert len(manager.canceled) == 1


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [({"logit_bias": {"20": 1}}, "logit_bias"), ({"n": 8, "prompt": ["4"] * 40}, "n")],
)
def test_what_the_model_does_not_have(fields: dict[str, Any], parameter: str) -> None:
    app = application(served(Manager()), Sampling())
    status, _, text = get(app, "/v1/completions", {"prompt": "4", **fields})
    assert (status, json.loads(text)["error"]["param"]) == (400, parameter)


def test_schemas_on_a_server_without_the_package_that_follows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = {"model": "tiny", "prompt": "1", "response_format": form}
    status, _, text = get(application(served(Manager()), Sampling()), "/v1/completions", body)
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, "response_format")
    assert error["message"].endswith("xgrammar is not installed there (pip install xgrammar)")


def test_what_is_left_of_the_context_is_the_default_of_a_chat() -> None:
    for room, want in ((None, 12), (10, 6)):
        app = application(served(manager := Manager(room=room)), Sampling())
        messages = [{"role": "user", "content": "1 1 1 1"}]
        assert get(app, "/v1/chat/completions", {"messages": messages})[0] == 200
        assert manager.asked[0]["max_new_tokens"] == want
    assert get(app, "/v1/completions", {"prompt": "1"})[0] == 400  # 16 new ones by default, and room for 9


@pytest.mark.parametrize(
    ("fields", "ends", "text"),
    [
        ({"stop_token_ids": [3]}, [3, 9], "1 2 "),
        ({"stop": ["<9>"]}, [9], "1 2 3 "),
        ({"ignore_eos": True}, -1, "1 2 3 "),
        ({"ignore_eos": True, "stop": "<9>"}, [9], "1 2 3 "),
        ({"stop": "2"}, [9], "1 "),
    ],
)
def test_where_an_answer_ends(fields: dict[str, Any], ends: Any, text: str) -> None:
    """The last token is left out if it is a stop that was asked for."""
    app = application(served(manager := Manager()), Sampling())
    found = json.loads(get(app, "/v1/completions", {"prompt": "4", "max_tokens": 3} | fields)[2])
    assert manager.asked[0]["eos_token_id"] == ends
    assert found["choices"][0]["text"] == text


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_ends_its_request(streams: bool) -> None:
    app = application(served(manager := Manager(is_endless=True)), Sampling())
    get(app, "/v1/completions", {"prompt": "4", "max_tokens": 5, "stream": streams}, leaves=True)
    assert len(manager.canceled) == 1
    assert not manager.output_router.result_handlers
    assert "shardconv_requests_running 0.0" in get(app, "/metrics")[2]


def test_too_many_are_told_to_come_again() -> None:
    app = application(served(Manager(is_endless=True), max_requests=1), Sampling())

    async def two() -> list[Any]:
        body = {"prompt": "4", "max_tokens": 5}
        first = asyncio.ensure_future(call(app, "/v1/completions", body, leaves=True))
        await asyncio.sleep(0.02)
        return [await call(app, "/v1/completions", body), await first]

    (status, headers, text), _ = asyncio.run(two())
    assert (status, headers["retry-after"]) == (429, "2")
    assert json.loads(text)["error"]["type"] == "rate_limit_error"


def test_bodies_that_are_too_large() -> None:
    app = BodyLimit(application(served(Manager()), Sampling()), 1000)
    status, _, text = get(app, "/v1/completions", {"prompt": "4 " * 1000, "max_tokens": 1})
    assert (status, json.loads(text)["error"]["message"]) == (413, "the request has more than 1000 bytes")
    assert get(app, "/v1/completions", {"prompt": "4", "max_tokens": 1})[0] == 200


def test_a_key() -> None:
    app = application(served(Manager()), Sampling(), "secret")
    body = {"prompt": "4", "max_tokens": 1}
    assert get(app, "/v1/completions", body)[0] == 401
    assert get(app, "/v1/models", key="Bearer other")[0] == 401
    assert get(app, "/v1/completions", body, key="Bearer secret")[0] == 200
    assert get(app, "/health")[0] == 200


def test_errors_of_the_ranks() -> None:
    app = application(served(Manager()), Sampling())
    status, _, text = get(app, "/v1/completions", {"prompt": "7", "max_tokens": 1})
    assert (status, json.loads(text)["error"]["message"]) == (400, "not this one")
    app = application(served(Manager(failure=RuntimeError("a rank died"))), Sampling())
    for path, body in (("/v1/completions", {"prompt": "4", "max_tokens": 1}), ("/health", None)):
        status, _, text = get(app, path, body)
        assert (status, json.loads(text)["error"]["message"]) == (503, "a rank died")


def test_the_description_of_the_api() -> None:
    found = json.loads(get(application(served(Manager()), Sampling()), "/openapi.json")[2])
    wanted = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"}
    assert wanted <= found["paths"].keys()
    assert found["paths"]["/metrics"]["get"]["responses"]["200"]["content"].keys() == {"text/plain"}
    answers = found["paths"]["/v1/responses"]["post"]["responses"]
    assert answers["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert {"413", "500"} <= answers.keys()


class TestDefaults:
    """Of requests that do not say how tokens are drawn: the model's, or none where they cannot be granted."""

    def test_those_of_the_model(self) -> None:
        drawn = {"do_sample": True, "temperature": 1, "top_p": 0.8, "top_k": 20, "min_p": 0.05}
        own = GenerationConfig(**drawn, repetition_penalty=1.05)
        assert default_sampling(own) == Sampling(1, 0.8, 20, 0.05, 1.05)
        assert default_sampling(own, frozenset({"repetition_penalty"})) == Sampling(1, 0.8, 20, 0.05)

    @pytest.mark.parametrize(
        "fields",
        [
            {"encoder_repetition_penalty": 1.05},
            {"suppress_tokens": [3]},
            {"bad_words_ids": [[3]]},
            {"no_repeat_ngram_size": 1},
            {"forced_eos_token_id": 0},
            {"num_beams": 2},
            {"sequence_bias": [[[3], 1.0]]},
        ],
    )
    def test_those_that_cannot_be_granted_are_refused_by_name(self, fields: dict[str, Any]) -> None:
        (name,) = fields
        with pytest.raises(ShardconvError, match=f"--ignore {name}"):
            default_sampling(GenerationConfig(**fields))
        assert default_sampling(GenerationConfig(**fields), frozenset(fields)) is not None
