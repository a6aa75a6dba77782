"""The endpoints of OpenAI's API that serve text: models, completions, chats; with health and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ..versions import __version__
from .answers import RETRY_AFTER_S, AnswerFailed, AnswerOptions, AnswerPiece, Served, answer
from .prompts import token_ids
from .schemas import (
    COMPLETION_TOKENS,
    BadRequest,
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    ErrorResponse,
    Sampling,
    TokenLogprob,
)
from .text_streams import TextStream

LOG = logging.getLogger(__name__)
LEAST_LOGPROB = -9999.0
"""For tokens that the model excludes: JSON has no infinity; OpenAI's API has this number."""
Indexed = tuple[int, AnswerPiece]
"""The number of an answer among those to one request, and a piece of it."""
_STATUSES = (400, 401, 404, 429, 503)


def application(served: Served, defaults: Sampling, api_key: str | None = None) -> FastAPI:
    """Return the web application of rank 0."""

    def require_key(request: Request) -> None:
        header = request.headers.get("authorization", "")
        if api_key is not None and not secrets.compare_digest(header.encode(), f"Bearer {api_key}".encode()):
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
    """Give every failure the form of an error of OpenAI's API."""

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
    prompts = await token_ids(body, served.tokenizer, served.prompt_calls)
    if len(prompts) * body.n > served.max_requests:
        raise BadRequest(f"{len(prompts) * body.n} answers are more than are given at a time", "n")
    options = AnswerOptions(
        body.limit or (None if is_chat else COMPLETION_TOKENS),
        await served.with_grammar(body.sampling(defaults)),
        body.stops,
        frozenset(body.stop_token_ids),
        body.ignore_eos,
        not body.skip_special_tokens,
    )
    answers = [
        answer(served, prompt, options.of_choice(number)) for prompt in prompts for number in range(body.n)
    ]
    form = _Form(served, is_chat, prompts, len(answers), body.skip_special_tokens)
    pieces = merged(answers)
    if body.stream:
        first = await anext(pieces)  # invalid requests are refused before the stream begins
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(_events(form, first, pieces, has_usage), media_type="text/event-stream")
    return await _whole(form, pieces, request)


async def merged(answers: Sequence[AsyncGenerator[AnswerPiece]]) -> AsyncGenerator[Indexed]:
    """Yield pieces of several answers as they come, with the numbers of their answers."""
    queue: asyncio.Queue[tuple[int, AnswerPiece | Exception | None]] = asyncio.Queue()

    async def collect(index: int, pieces: AsyncGenerator[AnswerPiece]) -> None:
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    queue.put_nowait((index, piece))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.ensure_future(collect(*each)) for each in enumerate(answers)]
    num_left = len(tasks)
    try:
        while num_left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _whole(form: _Form, pieces: AsyncGenerator[Indexed], request: Request) -> Response:
    """Answer in one piece; cancel the requests when the client disconnects."""

    async def collect() -> Response:
        pieces_of_choice: list[list[AnswerPiece]] = [[] for _ in form.last]
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    pieces_of_choice[index].append(form.seen(index, piece))
        finally:
            form.log()
        return JSONResponse(form.whole(pieces_of_choice))

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
    form: _Form, first: Indexed, pieces: AsyncGenerator[Indexed], has_usage: bool
) -> AsyncGenerator[str]:
    """Yield server-sent events; cancel the requests when the client disconnects."""
    async with aclosing(pieces):
        try:
            yield _event(form.part(*first))
            async for index, piece in pieces:
                yield _event(form.part(index, piece))
            if has_usage:
                yield _event(form.usage_part())
            yield "data: [DONE]\n\n"
        except (AnswerFailed, BadRequest) as error:
            status = error.status if isinstance(error, BadRequest) else 503
            yield _event({"error": {"message": str(error), "type": _kind(status)}})
        finally:
            form.log()


class _Form:
    """The JSON of the answers to one request, see OpenAI's API."""

    def __init__(
        self,
        served: Served,
        is_chat: bool,
        prompts: Sequence[Sequence[int]],
        count: int,
        skip_special_tokens: bool,
    ) -> None:
        self._is_chat = is_chat
        self._num_prompt_tokens = sum(map(len, prompts))
        self._begin = time.perf_counter()
        self._head = {"id": f"cmpl-{time.time_ns():x}", "created": int(time.time()), "model": served.name}
        self._texts = served.token_texts
        self._shown: list[list[int]] = [[] for _ in range(count)]
        """Tokens of each answer whose logprobs were shown."""
        self._offsets = [0] * count
        self._streams = [
            TextStream(served.tokenizer, skip_special_tokens=skip_special_tokens) for _ in range(count)
        ]
        self.last: list[AnswerPiece | None] = [None] * count
        """The last piece of each answer."""

    def seen(self, index: int, piece: AnswerPiece) -> AnswerPiece:
        """Note the last piece of an answer, and return it."""
        self.last[index] = piece
        return piece

    def log(self) -> None:
        """Log one line for the request."""
        reasons = [each.finish_reason or "canceled" if each is not None else "canceled" for each in self.last]
        LOG.info(
            "%s %s: %d tokens of the prompt, %d new ones, %.2f s, %s",
            self._head["id"],
            "chat" if self._is_chat else "completion",
            self._num_prompt_tokens,
            self._num_new_tokens(),
            time.perf_counter() - self._begin,
            " ".join(reasons),
        )

    def whole(self, found: Sequence[Sequence[AnswerPiece]]) -> dict[str, Any]:
        """Return all of the answers."""
        choices = []
        for index, pieces in enumerate(found):
            content = "".join(piece.text for piece in pieces)
            text = (
                {"message": {"role": "assistant", "content": content}} if self._is_chat else {"text": content}
            )
            logprobs = tuple(each for piece in pieces for each in piece.logprobs)
            choices.append(self._choice(index, text, pieces[-1].finish_reason, logprobs))
        return self._object("chat.completion", choices) | {"usage": self._usage()}

    def part(self, index: int, piece: AnswerPiece) -> dict[str, Any]:
        """Return a piece of an answer."""
        role = {"role": "assistant"} if self.last[index] is None else {}
        self.seen(index, piece)
        text = {"delta": role | {"content": piece.text}} if self._is_chat else {"text": piece.text}
        choice = self._choice(index, text, piece.finish_reason, piece.logprobs)
        return self._object("chat.completion.chunk", [choice])

    def usage_part(self) -> dict[str, Any]:
        """Return the numbers of tokens, at the end of a stream."""
        return self._object("chat.completion.chunk", []) | {"usage": self._usage()}

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return self._head | {"object": kind if self._is_chat else "text_completion", "choices": choices}

    def _choice(
        self, index: int, text: dict[str, Any], reason: str | None, logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        shown = None
        if logprobs:
            show = self._chat_logprobs if self._is_chat else self._text_logprobs
            shown = show(index, logprobs)
        return {"index": index, "logprobs": shown, "finish_reason": reason} | text

    def _chat_logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        def entry(token: int, logprob: float, is_first: bool) -> dict[str, Any]:
            return {
                "token": texts.name(token, is_first),
                "logprob": max(logprob, LEAST_LOGPROB),
                "bytes": [*texts.bytes_of(token, is_first)],
            }

        texts, content = self._texts, []
        for each in logprobs:
            is_first = not self._shown[index]
            top = [entry(*likely, is_first) for likely in each.top]
            content.append(entry(each.token, each.logprob, is_first) | {"top_logprobs": top})
            self._shown[index].append(each.token)
        return {"content": content}

    def _text_logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        names: list[str] = []
        offsets, tops = [], []
        for each in logprobs:
            is_first = not self._shown[index]
            # By text, as in the API. A text that several tokens have is that of the chosen one, or of the
            # likeliest one; the others are shown by their numbers.
            owners = {self._texts.name(each.token, is_first, "bytes:"): each.token}
            names.extend(owners)
            top: dict[str, float] = {}
            for token, logprob in each.top:
                name = self._texts.name(token, is_first, "bytes:")
                owner = owners.setdefault(name, token)
                top[name if owner == token else f"token_id:{token}"] = max(logprob, LEAST_LOGPROB)
            tops.append(top)
            offsets.append(self._offsets[index])
            self._shown[index].append(each.token)
            self._offsets[index] += len(self._streams[index].push(self._shown[index], is_last=False))
        return {
            "tokens": names,
            "token_logprobs": [max(each.logprob, LEAST_LOGPROB) for each in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _num_new_tokens(self) -> int:
        return sum(each.num_tokens for each in self.last if each is not None)

    def _usage(self) -> dict[str, int]:
        prompt, new = self._num_prompt_tokens, self._num_new_tokens()
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _kind(status: int) -> str:
    """Return the type of an error, as OpenAI's API names it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    return kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _error(
    message: str, status: int, parameter: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    body = ErrorResponse(error=ErrorBody(message=message, type=_kind(status), param=parameter))
    return JSONResponse(body.model_dump(), status, dict(headers or {}))
