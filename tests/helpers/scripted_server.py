"""The web application with a model that answers as it is told to, and OpenAI's client, in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from shardconv_runtime.openai_api.response_templates import ResponseTemplate
from shardconv_runtime.openai_api.schemas import Sampling
from shardconv_runtime.serving.answers import Served
from shardconv_runtime.serving.endpoints import application

END = 1
"""The token that ends an answer; the others are characters."""
END_TEXT = "<done>"


class CharacterTokenizer:
    """A token for each character; the chat template is a function."""

    all_special_ids = (END,)
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012 (as in transformers)
    chat_template = "{{ messages }}"

    def __init__(self) -> None:
        self.seen: list[tuple[list[Any], Any]] = []
        """Messages and tools of each request."""
        self.options: list[dict[str, Any]] = []
        """Other options of each request."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [*map(ord, text)]}

    def get_chat_template(self, tools: Any = None) -> str:
        return self.chat_template

    def apply_chat_template(
        self, messages: list[Any], tools: Any = None, tokenize: bool = True, **options: Any
    ) -> Any:
        self.seen.append((messages, tools))
        self.options.append(options)
        text = f"{json.dumps(messages)}<bot>\n" + options.get("begin", "")
        return self(text) if tokenize else text

    def convert_ids_to_tokens(self, token: int) -> str:
        return END_TEXT if token == END else chr(token)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        end = "" if skip_special_tokens else END_TEXT
        return "".join(end if each == END else chr(each) for each in tokens)


@dataclass
class Output:
    """As the manager's."""

    generated_tokens: list[int]
    is_last: bool
    error: str | None = None

    def is_finished(self) -> bool:
        return self.is_last


@dataclass
class ScriptedManager:
    """Answers requests with the next texts of a script, by tokens."""

    script: list[str]
    room: int | None = None
    failure: Any = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    canceled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.output_router = SimpleNamespace(result_handlers={})

    def is_running(self) -> bool:
        return True

    def register_result_handler(self, name: str, tell: Callable[[Any], None]) -> None:
        self.output_router.result_handlers[name] = tell

    def cancel_request(self, name: str) -> None:
        self.canceled.append(name)

    def add_request(self, prompt: list[int], request_id: str, max_new_tokens: int, **options: Any) -> None:
        outputs = self.outputs(prompt, max_new_tokens)
        self.asked.append({"prompt": prompt, "max_new_tokens": max_new_tokens, **options})
        for output in outputs:
            self.output_router.result_handlers[request_id](output)

    def outputs(self, prompt: list[int], max_new_tokens: int) -> list[Output]:
        """Return the results of a request, in order."""
        tokens = [*map(ord, self.script.pop(0)), END][:max_new_tokens]
        return [Output(tokens[:count], count == len(tokens)) for count in range(1, len(tokens) + 1)]


@dataclass(frozen=True)
class Scripted:
    """The application, and what it is made of."""

    app: Any
    manager: ScriptedManager
    tokenizer: CharacterTokenizer

    @property
    def client(self) -> Any:
        """OpenAI's asynchronous client, which needs no network."""
        import httpx2  # of the client
        import openai

        transport = httpx2.ASGITransport(self.app)
        http_client = httpx2.AsyncClient(transport=transport, base_url="http://scripted")
        return openai.AsyncOpenAI(
            base_url="http://scripted/v1", api_key="none", http_client=http_client, max_retries=0
        )


def scripted(script: list[str], template: dict[str, Any] | None = None, **options: Any) -> Scripted:
    """A server whose model gives these answers."""
    manager, tokenizer = ScriptedManager(list(script)), CharacterTokenizer()
    own = None if template is None else ResponseTemplate(template, "option")
    served = Served(manager, tokenizer, "tiny", 0x110000, None, END, response_template=own, **options)  # type: ignore[arg-type]
    return Scripted(application(served, Sampling()), manager, tokenizer)
