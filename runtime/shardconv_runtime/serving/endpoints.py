"""The endpoints of OpenAI's API that serve text: models, completions, chats; with health and metrics."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ..openai_api.answer_forms import AnswerForm, AnswerPiece, kind_of_error
from ..openai_api.chat_grammars import chat_constraint
from ..openai_api.chat_request import ChatRequest
from ..openai_api.message_parser import MessageParser
from ..openai_api.response_form import ResponseForm
from ..openai_api.response_templates import ResponseTemplate
from ..openai_api.responses_request import ResponsesRequest
from ..openai_api.schemas import (
    COMPLETION_TOKENS,
    BadRequest,
    CompletionRequest,
    ErrorBody,
    ErrorResponse,
    Sampling,
)
from ..versions import __version__
from .answers import RETRY_AFTER_S, AnswerFailed, AnswerOptions, Served, answer, parsed
from .body_limit import BodyLimit
from .metrics import Metrics
from .prompts import token_ids

LOG = logging.getLogger(__name__)
Indexed = tuple[int, AnswerPiece]
"""The number of an answer among those to one request, and a piece of it."""
_STATUSES = (400, 401, 404, 413, 429, 500, 503)
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""The form of an answer with ``stream``, beside JSON, in the description of the API."""


def new_application(
    about: Mapping[str, Any], api_key: str | None, failure: Callable[[], str | None], counts: Metrics
) -> tuple[FastAPI, list[Any]]:
    """Return a web application without answers, and the dependencies of endpoints that need the API key.

    Args:
        about: the model, as ``/v1/models`` tells clients.
        failure: returns why the ranks cannot answer.
    """

    def require_key(request: Request) -> None:
        header = request.headers.get("authorization", "")
        if api_key is not None and not secrets.compare_digest(header.encode(), f"Bearer {api_key}".encode()):
            raise HTTPException(401, "the server wants its API key: Authorization: Bearer KEY")

    app = FastAPI(
        title="shardconv",
        version=__version__,
        responses={status: {"model": ErrorResponse} for status in _STATUSES},
    )
    model = {**about, "created": int(time.time())}
    guarded = [Depends(require_key)]

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def one_model(name: str) -> dict[str, Any]:
        require_model(str(model["id"]), name)
        return model

    @app.get("/health")
    async def health() -> dict[str, str]:
        if (reason := failure()) is not None:
            raise AnswerFailed(reason)
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(counts.text(), media_type="text/plain; version=0.0.4")

    _add_error_handlers(app)
    app.add_middleware(BodyLimit)
    return app, guarded


def application(served: Served, defaults: Sampling, api_key: str | None = None) -> FastAPI:
    """Return the web application of rank 0."""
    template = served.response_template
    about = {
        "id": served.name,
        "object": "model",
        "owned_by": "shardconv",
        "response_template": None if template is None else template.source,
    }

    def failure() -> str | None:
        reason = served.manager.failure
        return str(reason or "stopped") if reason is not None or not served.manager.is_running() else None

    app, guarded = new_application(about, api_key, failure, served.metrics)

    @app.post("/v1/completions", dependencies=guarded, responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _respond(served, defaults, body, request)

    @app.post("/v1/chat/completions", dependencies=guarded, responses=_STREAMED)
    async def chats(body: ChatRequest, request: Request) -> Response:
        return await _respond(served, defaults, body, request)

    @app.post("/v1/responses", dependencies=guarded, responses=_STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await _respond(served, defaults, body.chat(), request, body)

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


def require_model(served_name: str, name: str | None) -> None:
    """Check that a request is for the model that is served."""
    if name is not None and name != served_name:
        raise BadRequest(f"the model {name!r} is not served; {served_name!r} is", "model", 404)


async def _respond(
    served: Served,
    defaults: Sampling,
    body: CompletionRequest | ChatRequest,
    request: Request,
    asked: ResponsesRequest | None = None,
) -> Response:
    """Answer a request; one to ``/v1/responses`` is also given as it was asked."""
    require_model(served.name, body.model)
    is_chat = isinstance(body, ChatRequest)
    inputs = None
    if isinstance(body, ChatRequest) and body.image_urls:
        if isinstance(served.images, str):
            raise BadRequest(f"this server takes no images: {served.images}", "messages")
        inputs = await served.images.inputs(body)
        prompts = inputs["input_ids"].tolist()
    else:
        prompts = await token_ids(body, served.tokenizer, served.prompt_calls)
    if len(prompts) * body.n > served.max_requests:
        raise BadRequest(f"{len(prompts) * body.n} answers are more than are given at a time", "n")
    template, sampling = None, body.sampling(defaults)
    if isinstance(body, ChatRequest):
        template = _template_for(served, body)
        open_field = None
        if template is not None:
            parser = _parser(served, body, template, prompts[0])
            parser.push("x")  # by text behind it, the parser sees the end of a pattern in the prompt
            open_field = parser.open_field
        constraint = chat_constraint(body, template, served.call_syntax, open_field, served.content_marks)
        sampling = replace(sampling, constraint=constraint)
    options = AnswerOptions(
        body.limit or (None if is_chat else COMPLETION_TOKENS),
        await served.with_grammar(sampling),
        body.stops,
        frozenset(body.stop_token_ids),
        body.ignore_eos,
        shows_special_tokens=template is not None or not body.skip_special_tokens,
        hides_end=template is not None,
    )
    answers = [
        _parsed(served, body, template, prompt, answer(served, prompt, options.of_choice(number), inputs))
        for prompt in prompts
        for number in range(body.n)
    ]
    form: AnswerForm | ResponseForm
    if asked is None:
        form = AnswerForm(
            served.name,
            served.token_texts,
            is_chat,
            prompts,
            len(answers),
            body.skip_special_tokens,
            is_parsed=template is not None,
            has_usage=body.stream_options is not None and body.stream_options.include_usage,
        )
    else:
        form = ResponseForm(served.name, asked, len(prompts[0]))
    pieces = merged(answers)
    if body.stream:
        first = await anext(pieces)  # invalid requests are refused before the stream begins
        return StreamingResponse(
            _events(form, first, pieces), media_type="text/event-stream", headers=form.headers
        )
    return await _whole(form, pieces, request)


def _template_for(served: Served, body: ChatRequest) -> ResponseTemplate | None:
    """Return the template that parses the answer of a chat: without tools, calls are a part of the text."""
    template = served.response_template
    return template if template is None or body.shown_tools else template.without_calls()


def _parsed(
    served: Served,
    body: CompletionRequest | ChatRequest,
    template: ResponseTemplate | None,
    prompt: Sequence[int],
    pieces: AsyncGenerator[AnswerPiece],
) -> AsyncGenerator[AnswerPiece]:
    """Return the pieces of an answer with the message that a template finds in them."""
    if template is None or not isinstance(body, ChatRequest):
        return pieces
    parser = _parser(served, body, template, prompt)
    return parsed(pieces, parser, has_one_call=not body.parallel_tool_calls)


def _parser(
    served: Served, body: ChatRequest, template: ResponseTemplate, prompt: Sequence[int]
) -> MessageParser:
    """Return a parser of an answer to a prompt."""
    begins_answer = body.chat_template_kwargs.get("add_generation_prompt", True)
    begin = template.begin_of_answer(served.tokenizer, prompt) if begins_answer else ""
    return MessageParser(partial(template.parser, begin, body.shown_tools), template.fields)


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


async def _whole(
    form: AnswerForm | ResponseForm, pieces: AsyncGenerator[Indexed], request: Request
) -> Response:
    """Answer in one piece; cancel the requests when the client disconnects."""

    async def collect() -> Response:
        pieces_of_choice: list[list[AnswerPiece]] = [[] for _ in form.last]
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    pieces_of_choice[index].append(form.seen(index, piece))
        finally:
            form.log()
        return JSONResponse(form.whole(pieces_of_choice), headers=form.headers)

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
    form: AnswerForm | ResponseForm, first: Indexed, pieces: AsyncGenerator[Indexed]
) -> AsyncGenerator[str]:
    """Yield server-sent events; cancel the requests when the client disconnects."""
    async with aclosing(pieces):
        try:
            for event in form.events(*first):
                yield event
            async for index, piece in pieces:
                for event in form.events(index, piece):
                    yield event
            for event in form.last_events():
                yield event
        except (AnswerFailed, BadRequest) as error:
            yield form.failure(str(error), error.status if isinstance(error, BadRequest) else 503)
        finally:
            form.log()


def _error(
    message: str, status: int, parameter: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    body = ErrorResponse(error=ErrorBody(message=message, type=kind_of_error(status), param=parameter))
    return JSONResponse(body.model_dump(), status, dict(headers or {}))
