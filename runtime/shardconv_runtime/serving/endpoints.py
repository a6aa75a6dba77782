"""The endpoints of OpenAI's API that serve text: models, completions, chats."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .answers import AnswerFailed, Piece, Served, answer
from .client_requests import BadRequest, Sampling, Wanted, chat_prompt, completion_prompt, wanted


def application(served: Served, defaults: Sampling) -> Starlette:
    """The web application of rank 0.

    Args:
        served: what answers.
        defaults: of requests that do not say how tokens are drawn.
    """

    def completions(is_chat: bool) -> Callable[[Request], Any]:
        async def respond(request: Request) -> Response:
            try:
                return await _respond(served, defaults, await _body(request), is_chat)
            except BadRequest as error:
                return _error(str(error), "invalid_request_error", error.status, error.parameter)
            except AnswerFailed as error:
                return _error(str(error), "server_error", 503)

        return respond

    async def models(request: Request) -> Response:
        model = {"id": served.name, "object": "model", "created": started, "owned_by": "shardconv"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(request: Request) -> Response:
        failure = served.manager.failure
        if failure is not None or not served.manager.is_running():
            return _error(str(failure or "stopped"), "server_error", 503)
        return JSONResponse({"status": "ok"})

    started = int(time.time())
    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", completions(is_chat=False), methods=["POST"]),
            Route("/v1/chat/completions", completions(is_chat=True), methods=["POST"]),
            Route("/health", health),
        ]
    )


async def _body(request: Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise BadRequest(f"the request is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the request should be a JSON object")
    return body


async def _respond(served: Served, defaults: Sampling, body: Mapping[str, Any], is_chat: bool) -> Response:
    if body.get("model", served.name) != served.name:
        raise BadRequest(f"the model {body['model']!r} is not served; {served.name!r} is", "model", 404)
    asked = wanted(body, defaults, is_chat)
    prompt = (chat_prompt if is_chat else completion_prompt)(body, served.tokenizer)
    pieces = answer(served, prompt, asked)
    form = _Form(served.name, is_chat, len(prompt))
    if asked.is_streamed:
        first = await anext(pieces)  # what cannot be answered is refused before the stream begins
        return StreamingResponse(_events(form, first, pieces, asked), media_type="text/event-stream")
    text, last = "", Piece("", 0)
    async with aclosing(pieces):
        async for last in pieces:
            text += last.text
    return JSONResponse(form.whole(text, last))


async def _events(
    form: _Form, first: Piece, pieces: AsyncGenerator[Piece], asked: Wanted
) -> AsyncGenerator[str]:
    """Server-sent events; the request is canceled when the client goes away."""
    async with aclosing(pieces):
        try:
            last = first
            yield _event(form.part(first, is_first=True))
            async for last in pieces:
                yield _event(form.part(last))
            if asked.has_usage:
                yield _event(form.usage_part(last))
            yield "data: [DONE]\n\n"
        except AnswerFailed as error:
            yield _event({"error": {"message": str(error), "type": "server_error"}})


class _Form:
    """The JSON of one answer, see OpenAI's API."""

    def __init__(self, model: str, is_chat: bool, num_prompt_tokens: int) -> None:
        self._is_chat = is_chat
        self._num_prompt_tokens = num_prompt_tokens
        created = int(time.time())
        self._head = {"id": f"cmpl-{time.time_ns():x}", "created": created, "model": model}

    def whole(self, text: str, last: Piece) -> dict[str, Any]:
        """All of an answer."""
        message = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choices = [self._choice(message, last)]
        return self._object("chat.completion", choices) | {"usage": self._usage(last)}

    def part(self, piece: Piece, is_first: bool = False) -> dict[str, Any]:
        """A piece of an answer."""
        role = {"role": "assistant"} if is_first else {}
        text = {"delta": role | {"content": piece.text}} if self._is_chat else {"text": piece.text}
        return self._object("chat.completion.chunk", [self._choice(text, piece)])

    def usage_part(self, last: Piece) -> dict[str, Any]:
        """The numbers of tokens, at the end of a stream."""
        return self._object("chat.completion.chunk", []) | {"usage": self._usage(last)}

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return self._head | {"object": kind if self._is_chat else "text_completion", "choices": choices}

    def _choice(self, text: dict[str, Any], piece: Piece) -> dict[str, Any]:
        return {"index": 0, "logprobs": None, "finish_reason": piece.finish_reason} | text

    def _usage(self, last: Piece) -> dict[str, int]:
        prompt, new = self._num_prompt_tokens, last.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _error(message: str, kind: str, status: int, parameter: str | None = None) -> Response:
    error = {"message": message, "type": kind, "param": parameter, "code": None}
    return JSONResponse({"error": error}, status)
