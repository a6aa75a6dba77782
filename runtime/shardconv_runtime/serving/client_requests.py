"""What a client asks for: the JSON of a request, checked. What the server cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMPLETION_TOKENS = 16
"""New tokens of a completion that names no number; the API's default."""

CHAT_TOKENS = 1024
"""New tokens of an answer in a chat that names no number."""

IGNORED = ("model", "user", "metadata", "store")
"""Fields that do not change the answer; the name of the model is checked elsewhere."""

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
"""Fields that the server does not know, with the values that ask for nothing."""


class BadRequest(Exception):
    """A request that cannot be answered.

    Args:
        message: for the client.
        parameter: the field at fault.
        status: of HTTP.
    """

    def __init__(self, message: str, parameter: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.status = status


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float
    """0: the most likely token."""
    top_p: float
    top_k: int
    """0: all tokens."""

    def options(self, vocabulary_size: int) -> dict[str, Any]:
        """Arguments of ``add_request`` of a manager that samples."""
        if self.temperature == 0:
            return {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
        top_k = self.top_k or vocabulary_size
        return {"temperature": self.temperature, "top_k": min(top_k, vocabulary_size), "top_p": self.top_p}


@dataclass(frozen=True)
class Wanted:
    """What a client asks for, beside the prompt."""

    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    is_streamed: bool
    has_usage: bool
    """A stream ends with the numbers of tokens."""


def wanted(body: Mapping[str, Any], defaults: Sampling, is_chat: bool) -> Wanted:
    """Check all fields of a request but the prompt.

    Raises:
        BadRequest: a field has a wrong value, or the server does not know it.
    """
    body = {name: value for name, value in body.items() if value is not None}
    limit = CHAT_TOKENS if is_chat else COMPLETION_TOKENS
    known = {"prompt", "messages", "stream", "stream_options", "stop", "temperature", "top_p", "top_k"}
    limits = ("max_tokens", "max_completion_tokens")
    for name in sorted(body.keys() - known - {*limits, *IGNORED}):
        if body[name] not in WITHOUT_EFFECT.get(name, ()):
            raise BadRequest(f"{name} is not supported", name)
    for name in limits:
        limit = int(_number(body, name, limit, 1, 2**31 - 1))
    sampling = Sampling(
        _number(body, "temperature", defaults.temperature, 0, 100),
        _number(body, "top_p", defaults.top_p, 0, 1),
        int(_number(body, "top_k", defaults.top_k, -1, 2**31 - 1)),
    )
    if sampling.top_k < 0:  # some clients say so
        sampling = Sampling(sampling.temperature, sampling.top_p, 0)
    options = body.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise BadRequest("stream_options may have include_usage", "stream_options")
    return Wanted(limit, sampling, _stops(body), _flag(body, "stream"), _flag(options, "include_usage"))


def completion_prompt(body: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Token ids of ``prompt``: a text, or ids themselves."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        if not all(0 <= token < len(tokenizer) for token in prompt):
            raise BadRequest(f"prompt has token ids that are not below {len(tokenizer)}", "prompt")
        return prompt
    raise BadRequest("prompt should be one text or one list of token ids", "prompt")


def chat_prompt(body: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Token ids of ``messages``, by the tokenizer's chat template."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise BadRequest("messages should be a list of objects with role and content", "messages")
    if tokenizer.chat_template is None:
        raise BadRequest("the model's tokenizer has no chat template; use completions", "messages", 404)
    texts = [{"role": m["role"], "content": _text(m.get("content"))} for m in messages]
    try:
        encoded = tokenizer.apply_chat_template(texts, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # a template may raise on roles that it does not expect
        raise BadRequest(f"the chat template does not take these messages: {error}", "messages") from error
    return list(encoded["input_ids"])


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadRequest("the content of a message should be text", "messages")


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise BadRequest(f"{name} should be a number from {least} to {most}", name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} should be true or false", name)
    return value


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequest("stop should be a text or a list of texts", "stop")
    return tuple(stops)
