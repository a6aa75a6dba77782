"""Answers of the manager to one client: pieces of text as they come from rank 0's loop, and metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import ShardconvError
from ..openai_api.answer_forms import AnswerPiece
from ..openai_api.call_syntax import CallSyntax
from ..openai_api.message_parser import MessageParser
from ..openai_api.response_templates import ResponseTemplate
from ..openai_api.schemas import BadRequest, Sampling
from ..openai_api.text_streams import TextStream
from ..openai_api.token_texts import TokenTexts
from .bounded_calls import BoundedCalls
from .grammars import PACKAGE, SLOW
from .media import Images
from .metrics import Metrics
from .outside_batch import Job

RETRY_AFTER_S = 2
"""Seconds that a client is told to wait if too many requests are answered."""


@dataclass(frozen=True)
class Served:
    """The objects that answer requests.

    Attributes:
        manager: the running manager of continuous batching, made with ``serving_config``.
        grammars: compiles JSON schemas; None if the package is not installed.
        compiler_calls: the calls with which it does so.
        prompt_calls: make the tokens of texts; None to make them here.
        processor: its ``RequestProcessor``, which knows of failed requests and of logprobs.
        name: the name of the model, for clients.
        vocabulary_size: number of logits.
        context: most tokens of a prompt and its answer; None if the model says nothing.
        max_requests: answered or waiting at a time; more are told to come again.
        response_template: parses the answers of chats; None to return their texts.
        call_syntax: how calls of tools are written, or why that is unknown.
        content_marks: texts before and after the content of an answer, or why they are unknown.
        cached_tokens: name of a request -> tokens of its prompt that were in the cache; None if none can be.
        images: makes the model's inputs of images, or why there are none.
        outside: the ``OutsideBatch`` that answers requests with images; None if there is none.
        metrics: counts of this server.
    """

    manager: Any
    tokenizer: Any
    name: str
    vocabulary_size: int
    context: int | None
    eos_token_id: int | list[int] | None
    max_requests: int = 256
    processor: Any = None
    grammars: Any = None
    has_logits: bool = True
    """Rank 0 has them: it is not the first of several stages."""
    compiler_calls: BoundedCalls | None = None
    prompt_calls: BoundedCalls | None = None
    response_template: ResponseTemplate | None = None
    call_syntax: CallSyntax | str = "the tokenizer has no response template (--response-template FILE)"
    content_marks: tuple[str, str] | str = ("", "")
    cached_tokens: dict[str, int] | None = None
    images: Images | str = "the model has no processor for images"
    outside: Any = None
    metrics: Metrics = field(default_factory=Metrics)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Return the texts of single tokens, for logprobs."""
        return TokenTexts(self.tokenizer)

    async def with_grammar(self, sampling: Sampling) -> Sampling:
        """Return how tokens are drawn, with the compiled grammar of the schema if there is one."""
        if sampling.constraint is None:
            return sampling
        if find_spec(PACKAGE) is None:
            raise BadRequest(
                f"this server cannot follow JSON schemas: {PACKAGE} is not installed there "
                f"(pip install {PACKAGE})",
                sampling.constraint.parameter,
            )
        if self.grammars is None or self.compiler_calls is None:
            name = sampling.constraint.parameter
            raise BadRequest(
                f"{name} needs a tokenizer that {PACKAGE} knows, and a token that ends an answer", name
            )
        grammar = await self.compiler_calls.awaited(self.grammars.require, sampling.constraint)
        return replace(sampling, grammar=grammar)

    @property
    def ends(self) -> frozenset[int]:
        """Return tokens that end an answer."""
        return end_tokens(self.eos_token_id)


def end_tokens(given: int | list[int] | None) -> frozenset[int]:
    """Return the tokens that a generation config names as ``eos_token_id``."""
    return frozenset(given if isinstance(given, list) else [] if given is None else [given])


@dataclass(frozen=True)
class AnswerOptions:
    """The options of a client's request."""

    max_new_tokens: int | None
    """None for the rest of the context."""
    sampling: Sampling
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignores_end: bool = False
    shows_special_tokens: bool = False
    hides_end: bool = False
    """The text of the token with which the model ends its answer is left out."""

    def of_choice(self, number: int) -> AnswerOptions:
        """Return the options of one of several answers to a prompt; each one draws from its own seed."""
        seed = self.sampling.seed
        if seed is None or number == 0:
            return self
        return replace(self, sampling=replace(self.sampling, seed=(seed + number) % 2**63))


class AnswerFailed(Exception):
    """The ranks cannot answer; the server is about to end."""


async def answer(
    served: Served,
    prompt: list[int],
    wanted: AnswerOptions,
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> AsyncGenerator[AnswerPiece]:
    """Yield the pieces of an answer; a generator that is closed cancels its request.

    Args:
        inputs: the model's inputs for a prompt with images, which is answered outside of the batch.
    """
    metrics = served.metrics
    if metrics.num_running >= served.max_requests:
        raise BadRequest(f"{served.max_requests} requests are answered or wait; try again later", status=429)
    if wanted.sampling.num_logprobs is not None and not (served.processor and served.has_logits):
        raise BadRequest("logprobs are not known to the first of several stages", "logprobs")
    # Stop strings that are special tokens are not in the text, so their ids end the answer.
    special = {served.tokenizer.convert_ids_to_tokens(i): i for i in served.tokenizer.all_special_ids}
    stops = [stop for stop in wanted.stops if stop not in special]
    stop_tokens = wanted.stop_token_ids | {special[stop] for stop in wanted.stops if stop in special}
    ends = stop_tokens if wanted.ignores_end else stop_tokens | served.ends
    max_new_tokens = _limit(served, prompt, wanted, inputs)
    name, outputs = f"cmpl-{uuid.uuid4().hex}", asyncio.Queue[Any]()
    loop = asyncio.get_running_loop()
    if inputs is None:
        source = served.manager
        _add(
            served,
            name,
            prompt,
            max_new_tokens,
            ends,
            wanted,
            lambda output: loop.call_soon(outputs.put_nowait, output),
        )
    else:
        source = served.outside
        served.processor.watch(name)
        job = Job(name, inputs, max_new_tokens, tuple(sorted(ends)), wanted.sampling)
        source.add_request(job, lambda output: loop.call_soon_threadsafe(outputs.put_nowait, output))
    stream = TextStream(served.tokenizer, stops, skip_special_tokens=not wanted.shows_special_tokens)
    is_finished, num_told, num_shown, last_at = False, 0, 0, time.perf_counter()
    num_cached = None
    with metrics.running(len(prompt)):
        try:
            while not is_finished:
                output = await outputs.get()
                if output.error is not None:
                    is_finished = True
                    if inputs is not None and served.manager.failure is None:
                        raise BadRequest(f"the model cannot answer this: {output.error}", "messages", 500)
                    raise AnswerFailed(output.error)
                if served.processor is not None and name in served.processor.failed:
                    raise BadRequest("the model's logits are not numbers for this prompt", "prompt", 500)
                constraint = wanted.sampling.constraint
                if constraint is not None and name in served.grammars.failures:
                    why = served.grammars.failures[name]
                    if why == SLOW:
                        served.grammars.refuse(constraint, why)
                    raise BadRequest(why, constraint.parameter)
                tokens, is_finished = output.generated_tokens, output.is_finished()
                if num_cached is None and served.cached_tokens is not None:
                    num_cached = served.cached_tokens.get(name, 0)
                    metrics.prompt_was_cached(num_cached)
                now = time.perf_counter()
                metrics.tokens_came(len(tokens) - num_told, now - last_at, is_first=not num_told)
                num_told, last_at = len(tokens), now
                has_end = bool(tokens) and tokens[-1] in ends
                # A stop that is its own token is not a part of the answer.
                hides_last = has_end and (wanted.hides_end or tokens[-1] in stop_tokens)
                shown = tokens[:-1] if hides_last else tokens
                text = stream.push(shown, is_finished)
                is_last = stream.is_stopped or is_finished
                if not is_last and not text:
                    continue
                reason, logprobs = None, ()
                if is_last:
                    is_full = len(tokens) >= max_new_tokens and not has_end and not stream.is_stopped
                    reason = "length" if is_full else "stop"
                if wanted.sampling.num_logprobs is not None:
                    logprobs = tuple(served.processor.logprobs[name][num_shown : len(shown)])
                    num_shown = len(shown)
                is_cut = is_last and not (has_end and tokens[-1] in served.ends)
                end_text = ""
                if wanted.hides_end and is_last and not is_cut:
                    end_text = str(served.tokenizer.decode(tokens[-1:], clean_up_tokenization_spaces=False))
                yield AnswerPiece(
                    text,
                    len(tokens),
                    reason,
                    logprobs,
                    is_cut,
                    end_text=end_text,
                    num_cached_tokens=num_cached,
                )
                if is_last:
                    return
        finally:
            if not is_finished:
                source.cancel_request(name)
            _forget(served, name)


async def parsed(
    pieces: AsyncGenerator[AnswerPiece], parser: MessageParser, *, has_one_call: bool = False
) -> AsyncGenerator[AnswerPiece]:
    """Yield the pieces of an answer with the parts of its message; their texts are the content.

    Args:
        has_one_call: the answer ends after its first call of a tool.
    """
    num_tokens = num_reasoning = num_calls = 0
    async with aclosing(pieces):
        async for piece in pieces:
            was_reasoning = parser.is_reasoning
            delta = parser.push(piece.text)
            if was_reasoning or parser.is_reasoning or delta.reasoning:
                num_reasoning += piece.num_tokens - num_tokens
            num_tokens, reason = piece.num_tokens, piece.finish_reason
            if reason is not None:
                delta = delta + parser.end(piece.end_text, is_cut=piece.is_cut)
            if has_one_call and delta.calls:
                delta, reason = replace(delta, calls=delta.calls[:1]), "stop"
            num_calls += len(delta.calls)
            if reason is None and delta.is_empty and not piece.logprobs:
                continue
            if reason == "stop" and num_calls:
                reason = "tool_calls"
            yield replace(
                piece,
                text=delta.content,
                finish_reason=reason,
                message=delta,
                num_reasoning_tokens=num_reasoning,
            )
            if reason is not None:
                return


def _forget(served: Served, name: str) -> None:
    served.manager.output_router.result_handlers.pop(name, None)
    if served.processor is not None:
        served.processor.forget(name)
    if served.grammars is not None:
        served.grammars.failures.pop(name, None)
    if served.cached_tokens is not None:
        served.cached_tokens.pop(name, None)


def _limit(served: Served, prompt: list[int], wanted: AnswerOptions, inputs: Any) -> int:
    """Return the most new tokens of an answer."""
    room = served.manager.room if inputs is None else None
    limits = [limit for limit in (served.context, room) if limit is not None]
    if not prompt:
        raise BadRequest("a prompt without tokens cannot be continued", "prompt")
    if outside := [token for token in prompt if not 0 <= token < served.vocabulary_size]:
        raise BadRequest(
            f"the model has {served.vocabulary_size} tokens, and the prompt has the id {outside[0]}", "prompt"
        )
    if outside := [token for token, _ in wanted.sampling.logit_bias if token >= served.vocabulary_size]:
        raise BadRequest(
            f"the model has {served.vocabulary_size} tokens, and logit_bias names {outside[0]}", "logit_bias"
        )
    if wanted.max_new_tokens is None:
        left = min(limits, default=len(prompt) + 2**20) - len(prompt)
        if left < 1:
            raise BadRequest(
                f"the prompt has {len(prompt)} tokens, and there is room for {min(limits)}", "prompt"
            )
        return left
    if limits and len(prompt) + wanted.max_new_tokens > min(limits):
        raise BadRequest(
            f"the model's context has {min(limits)} tokens; {len(prompt)} of the prompt and "
            f"{wanted.max_new_tokens} new ones were asked for",
            "max_tokens",
        )
    return wanted.max_new_tokens


def _add(
    served: Served,
    name: str,
    prompt: list[int],
    max_new_tokens: int,
    ends: frozenset[int],
    wanted: AnswerOptions,
    tell: Any,
) -> None:
    if served.manager.failure is not None:
        raise AnswerFailed(str(served.manager.failure))
    served.manager.register_result_handler(name, tell)
    if served.cached_tokens is not None:
        served.cached_tokens[name] = 0
    if served.processor is not None:
        served.processor.watch(name)
    try:
        served.manager.add_request(
            prompt,
            request_id=name,
            max_new_tokens=max_new_tokens,
            streaming=True,
            eos_token_id=sorted(ends) or -1,
            sampling=wanted.sampling,
            num_prompt_tokens=len(prompt),
        )
    except ShardconvError as error:
        _forget(served, name)
        raise BadRequest(str(error)) from error
