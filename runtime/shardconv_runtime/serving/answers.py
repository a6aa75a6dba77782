"""Answers of the manager to one client: pieces of text as they come, from rank 0's loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from ..errors import ShardconvError
from .client_requests import BadRequest, Wanted
from .text_stream import TextStream


@dataclass(frozen=True)
class Served:
    """What answers the requests.

    Attributes:
        manager: of continuous batching, running, made by ``serving_config``.
        name: of the model, for clients.
        vocabulary_size: number of logits.
        context: most tokens of a prompt and its answer; None if the model says nothing.
    """

    manager: Any
    tokenizer: Any
    name: str
    vocabulary_size: int
    context: int | None
    eos_token_id: int | list[int] | None


@dataclass(frozen=True)
class Piece:
    """A part of an answer."""

    text: str
    num_tokens: int
    """Of the answer so far."""
    finish_reason: str | None = None
    """``stop`` or ``length`` in the last one."""


class AnswerFailed(Exception):
    """The ranks cannot answer; the server is about to end."""


async def answer(served: Served, prompt: list[int], wanted: Wanted) -> AsyncGenerator[Piece]:
    """Yield the pieces of an answer; a generator that is closed cancels its request.

    Args:
        served: what answers.
        prompt: token ids.
        wanted: by the client.

    Raises:
        BadRequest: the request does not fit the model or its cache.
        AnswerFailed: the loop failed.
    """
    name, outputs = f"cmpl-{uuid.uuid4().hex}", asyncio.Queue[Any]()
    _add(served, name, prompt, wanted, outputs)
    stream, is_finished = TextStream(served.tokenizer, wanted.stops), False
    try:
        while not is_finished:
            output = await outputs.get()
            if output.error is not None:
                is_finished = True
                raise AnswerFailed(output.error)
            tokens, is_finished = output.generated_tokens, output.is_finished()
            text = stream.push(tokens, is_finished)
            if stream.is_stopped or is_finished:
                is_full = len(tokens) >= wanted.max_new_tokens and not _ends(served, tokens)
                yield Piece(text, len(tokens), "length" if is_full and not stream.is_stopped else "stop")
                return
            if text:
                yield Piece(text, len(tokens))
    finally:
        if not is_finished:
            served.manager.cancel_request(name)
        served.manager.output_router.result_handlers.pop(name, None)


def _add(served: Served, name: str, prompt: list[int], wanted: Wanted, outputs: Any) -> None:
    num_tokens = len(prompt) + wanted.max_new_tokens
    if served.context is not None and num_tokens > served.context:
        raise BadRequest(
            f"the model's context has {served.context} tokens; {len(prompt)} of the prompt and "
            f"{wanted.max_new_tokens} new ones were asked for"
        )
    if served.manager.failure is not None:
        raise AnswerFailed(str(served.manager.failure))
    served.manager.register_result_handler(name, outputs.put_nowait)
    try:
        served.manager.add_request(
            prompt,
            request_id=name,
            max_new_tokens=wanted.max_new_tokens,
            streaming=True,
            eos_token_id=served.eos_token_id,
            **wanted.sampling.options(served.vocabulary_size),
        )
    except ShardconvError as error:
        served.manager.output_router.result_handlers.pop(name, None)
        raise BadRequest(str(error)) from error


def _ends(served: Served, tokens: list[int]) -> bool:
    """Whether an answer ends with the token for it."""
    ends = served.eos_token_id
    return bool(tokens) and tokens[-1] in (ends if isinstance(ends, list) else [ends])
