"""The endpoints of OpenAI's API that serve text: models, completions, chats; with health and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ..versions import __version__
from .answers import RETRY_AFTER_S, AnswerFailed, AnswerOptions, AnswerPiece, Served, answer
from .schemas import (
    COMPLETION_TOKENS,
    BadRequest,
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    ErrorResponse,
    GenerationRequest,
    Sampling,
)

LOG = logging.getLogger(__name__)
_STATUSES = (400, 401, 404, 429, 503)


def application(served: Served, defaults: Sampling, api_key: str | None = None) -> FastAPI:
    """The web application of rank 0.

    Args:
        served: what answers.
        defaults: of requests that do not say how tokens are drawn.
        api_key: what clients have to send; None: nothing.
    """

    def require_key(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if api_key is not None and not secrets.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            raise HTTPException(401, "the server wants its API key: Authorization: Bearer KEY")

    app = FastAPI(
        title="shardconv",
        version=__version__,
        responses={status: {"model": ErrorResponse} for status in _STATUSES},
    )
    started = int(time.time())
    model = {"id": served.name, "object": "model", "created": started, "owned_by": "shardconv"}
    guarded = [Depends(require_key)]

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def one_model(name: str) -> dict[str, Any]:
        _require_model(served, name)
        return model

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _respond(served, defaults, body, request)

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chats(body: ChatRequest, request: Request) -> Response:
        return await _respond(served, defaults, body, request)

    @app.get("/health")
    async def health() -> dict[str, str]:
        failure = served.manager.failure
        if failure is not None or not served.manager.is_running():
            raise AnswerFailed(str(failure or "stopped"))
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4")

    _add_error_handlers(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Every failure has the form of an error of OpenAI's API."""

    @app.exception_handler(BadRequest)
    async def bad(request: Request, error: BadRequest) -> Response:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 429 else None
        return _error(str(error), error.status, error.parameter, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "body"]
        name = first.get("ctx", {}).get("parameter") or (where[0] if where else None)
        return _error(": ".join(filter(None, [".".join(where), first["msg"]])), 400, name)

    @app.exception_handler(AnswerFailed)
    async def failed(request: Request, error: AnswerFailed) -> Response:
        return _error(str(error), 503)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _error(str(error.detail), error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        LOG.exception("a request failed")
        return _error(f"{type(error).__name__}: {error}", 500)


def _require_model(served: Served, name: str) -> None:
    if name != served.name:
        raise BadRequest(f"the model {name!r} is not served; {served.name!r} is", "model", 404)


async def _respond(
    served: Served, defaults: Sampling, body: CompletionRequest | ChatRequest, request: Request
) -> Response:
    _require_model(served, served.name if body.model is None else body.model)
    is_chat = isinstance(body, ChatRequest)
    try:
        prompt = body.token_ids(served.tokenizer)
    except (UnicodeError, TypeError, ValueError) as error:
        raise BadRequest(f"the text cannot be made into tokens: {error}") from error
    pieces = answer(served, prompt, _wanted(body, defaults, is_chat))
    form = _Form(served.name, is_chat, len(prompt))
    if body.stream:
        first = await anext(pieces)  # what cannot be answered is refused before the stream begins
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(_events(form, first, pieces, has_usage), media_type="text/event-stream")
    return await _whole(form, pieces, request)


def _wanted(body: GenerationRequest, defaults: Sampling, is_chat: bool) -> AnswerOptions:
    return AnswerOptions(
        body.limit or (None if is_chat else COMPLETION_TOKENS),
        body.sampling(defaults),
        body.stops,
        frozenset(body.stop_token_ids),
        body.ignore_eos,
        not body.skip_special_tokens,
    )


async def _whole(form: _Form, pieces: AsyncGenerator[AnswerPiece], request: Request) -> Response:
    """An answer in one piece; its request is canceled when the client goes away."""

    async def collect() -> Response:
        text, last = "", AnswerPiece("", 0)
        async with aclosing(pieces):
            async for last in pieces:
                text += last.text
        form.log(last)
        return JSONResponse(form.whole(text, last))

    async def wait_for_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(collect()), asyncio.ensure_future(wait_for_end())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()  # type: ignore[return-value]
        return Response(status_code=499)  # nobody reads it
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _events(
    form: _Form, first: AnswerPiece, pieces: AsyncGenerator[AnswerPiece], has_usage: bool
) -> AsyncGenerator[str]:
    """Server-sent events; the request is canceled when the client goes away."""
    async with aclosing(pieces):
        try:
            last = first
            yield _event(form.part(first, is_first=True))
            async for last in pieces:
                yield _event(form.part(last))
            if has_usage:
                yield _event(form.usage_part(last))
            yield "data: [DONE]\n\n"
        except AnswerFailed as error:
            yield _event({"error": {"message": str(error), "type": "server_error"}})
        finally:
            form.log(last)


class _Form:
    """The JSON of one answer, see OpenAI's API."""

    def __init__(self, model: str, is_chat: bool, num_prompt_tokens: int) -> None:
        self._is_chat = is_chat
        self._num_prompt_tokens = num_prompt_tokens
        self._begin = time.perf_counter()
        self._head = {"id": f"cmpl-{time.time_ns():x}", "created": int(time.time()), "model": model}

    def log(self, last: AnswerPiece) -> None:
        """One line for the request."""
        LOG.info(
            "%s %s: %d tokens of the prompt, %d new ones, %.2f s, %s",
            self._head["id"],
            "chat" if self._is_chat else "completion",
            self._num_prompt_tokens,
            last.num_tokens,
            time.perf_counter() - self._begin,
            last.finish_reason or "canceled",
        )

    def whole(self, text: str, last: AnswerPiece) -> dict[str, Any]:
        """All of an answer."""
        message = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choices = [self._choice(message, last)]
        return self._object("chat.completion", choices) | {"usage": self._usage(last)}

    def part(self, piece: AnswerPiece, is_first: bool = False) -> dict[str, Any]:
        """A piece of an answer."""
        role = {"role": "assistant"} if is_first else {}
        text = {"delta": role | {"content": piece.text}} if self._is_chat else {"text": piece.text}
        return self._object("chat.completion.chunk", [self._choice(text, piece)])

    def usage_part(self, last: AnswerPiece) -> dict[str, Any]:
        """The numbers of tokens, at the end of a stream."""
        return self._object("chat.completion.chunk", []) | {"usage": self._usage(last)}

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return self._head | {"object": kind if self._is_chat else "text_completion", "choices": choices}

    def _choice(self, text: dict[str, Any], piece: AnswerPiece) -> dict[str, Any]:
        return {"index": 0, "logprobs": None, "finish_reason": piece.finish_reason} | text

    def _usage(self, last: AnswerPiece) -> dict[str, int]:
        prompt, new = self._num_prompt_tokens, last.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(
    message: str, status: int, parameter: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    body = ErrorResponse(error=ErrorBody(message=message, type=kind, param=parameter))
    return JSONResponse(body.model_dump(), status, dict(headers or {}))
