"""The web application without a server and without ranks: a manager that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.serving.answers import Served
from shardconv_runtime.serving.endpoints import application
from shardconv_runtime.serving.request_sampling import default_sampling
from shardconv_runtime.serving.schemas import Sampling
from transformers import GenerationConfig


@dataclass
class Output:
    """As the manager's."""

    generated_tokens: list[int]
    is_last: bool = False
    error: str | None = None

    def is_finished(self) -> bool:
        return self.is_last


@dataclass
class Manager:
    """Answers with the tokens 1, 2, 3 ... up to the number that is asked for, or never ends."""

    is_endless: bool = False
    room: int | None = None
    failure: Any = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    canceled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.output_router = SimpleNamespace(result_handlers={})

    def is_running(self) -> bool:
        return self.failure is None

    def register_result_handler(self, name: str, tell: Callable[[Any], None]) -> None:
        self.output_router.result_handlers[name] = tell

    def cancel_request(self, name: str) -> None:
        self.canceled.append(name)

    def add_request(self, prompt: list[int], request_id: str, max_new_tokens: int, **options: Any) -> None:
        if prompt == [7]:
            raise ShardconvError("not this one")
        self.asked.append({"prompt": prompt, "max_new_tokens": max_new_tokens, **options})
        tell = self.output_router.result_handlers[request_id]
        count = 1 if self.is_endless else max_new_tokens
        for number in range(1, count + 1):
            tokens = list(range(1, number + 1))
            tell(Output(tokens, number == max_new_tokens))


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
    assert (asked["temperature"], asked["top_k"], asked["eos_token_id"]) == (0.5, 3, [9])


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


class TestDefaults:
    """Of requests that do not say how tokens are drawn: the model's, or none where they cannot be granted."""

    def test_those_of_the_model(self) -> None:
        drawn = {"do_sample": True, "temperature": 1, "top_p": 0.8, "top_k": 20, "min_p": 0.05}
        own = GenerationConfig(**drawn, repetition_penalty=1.0)
        assert default_sampling(own) == Sampling(1, 0.8, 20, 0.05)

    @pytest.mark.parametrize(
        "fields",
        [
            {"repetition_penalty": 1.05},
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
