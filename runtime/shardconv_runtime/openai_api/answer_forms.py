"""The JSON of the answers to completions and chats, whole and in pieces."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .message_parser import MessageDelta
from .schemas import TokenLogprob
from .text_streams import TextStream
from .token_texts import TokenTexts

LOG = logging.getLogger(__name__)
LEAST_LOGPROB = -9999.0
"""For tokens that the model excludes: JSON has no infinity; OpenAI's API has this number."""


@dataclass(frozen=True)
class AnswerPiece:
    """A part of an answer."""

    text: str
    num_tokens: int
    """The number of tokens of the answer so far."""
    finish_reason: str | None = None
    """``stop`` or ``length`` in the last one."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """The logprobs of the tokens since the piece before, if they were asked for."""
    is_cut: bool = False
    """The answer ends here for another reason than that the model has ended it."""
    message: MessageDelta | None = None
    """The new parts of the message if the answer is parsed."""
    end_text: str = ""
    """The text of the token with which the model has ended the answer, if it is left out of ``text``."""
    num_cached_tokens: int | None = None
    """The number of tokens of the prompt that were in the cache; None if the cache does not share."""
    num_reasoning_tokens: int = 0
    """The number of tokens of the reasoning so far, if the answer is parsed."""


class AnswerForm:
    """The JSON of the answers to one request, see OpenAI's API."""

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        is_chat: bool,
        prompts: Sequence[Sequence[int]],
        count: int,
        skip_special_tokens: bool,
        *,
        is_parsed: bool = False,
        has_usage: bool = False,
    ) -> None:
        self._has_usage = has_usage
        self._is_chat = is_chat
        self._is_parsed = is_parsed
        self._num_choices = count // len(prompts)
        self._num_prompt_tokens = sum(map(len, prompts))
        self._begin = time.perf_counter()
        self._head = {"id": f"cmpl-{time.time_ns():x}", "created": int(time.time()), "model": model}
        self._texts = texts
        self._shown: list[list[int]] = [[] for _ in range(count)]
        """Tokens of each answer whose logprobs were shown."""
        self._offsets = [0] * count
        self._num_calls = [0] * count
        """Calls of tools that were told of each answer."""
        self._streams = [
            TextStream(texts.tokenizer, skip_special_tokens=skip_special_tokens) for _ in range(count)
        ]
        self.headers = {"x-request-id": str(self._head["id"])}
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
            text = {"message": _message(pieces, content)} if self._is_chat else {"text": content}
            logprobs = tuple(each for piece in pieces for each in piece.logprobs)
            choices.append(self._choice(index, text, pieces[-1].finish_reason, logprobs))
        return self._object("chat.completion", choices) | {"usage": self._usage()}

    def parts(self, index: int, piece: AnswerPiece) -> list[dict[str, Any]]:
        """Return a piece of an answer; if it is parsed, the end is another piece, as clients expect."""
        role = {"role": "assistant"} if self.last[index] is None else {}
        self.seen(index, piece)
        text = {"delta": role | {"content": piece.text}} if self._is_chat else {"text": piece.text}
        reasons = [piece.finish_reason]
        if piece.message is not None:
            text = {"delta": role | _delta(piece.message, self._num_calls[index])}
            self._num_calls[index] += len(piece.message.calls)
            if piece.finish_reason is not None and text["delta"]:
                reasons = [None, piece.finish_reason]
        choices = [self._choice(index, text, reasons[0], piece.logprobs)]
        choices += [self._choice(index, {"delta": {}}, reason, ()) for reason in reasons[1:]]
        return [self._object("chat.completion.chunk", [choice]) for choice in choices]

    def events(self, index: int, piece: AnswerPiece) -> Iterator[str]:
        """Yield the events of a piece of an answer."""
        for part in self.parts(index, piece):
            yield _event(part)

    def last_events(self) -> Iterator[str]:
        """Yield the events at the end of a stream."""
        if self._has_usage:
            yield _event(self.usage_part())
        yield "data: [DONE]\n\n"

    def failure(self, message: str, status: int) -> str:
        """Return the event of an error in a stream that has begun."""
        return _event({"error": {"message": message, "type": kind_of_error(status)}})

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

    def _usage(self) -> dict[str, Any]:
        prompt, new = self._num_prompt_tokens, self._num_new_tokens()
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
        }
        # The answers to one prompt are counted with the first of them, as the prompt is.
        cached = [each.num_cached_tokens for each in self.last[:: self._num_choices] if each is not None]
        counts = [count for count in cached if count is not None]
        if counts:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(counts)}
        if self._is_parsed:
            num_reasoning = sum(each.num_reasoning_tokens for each in self.last if each is not None)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage


def _message(pieces: Sequence[AnswerPiece], content: str) -> dict[str, Any]:
    """Return the message of a whole answer."""
    deltas = [piece.message for piece in pieces if piece.message is not None]
    message = sum(deltas, MessageDelta())
    delta = _delta(message, 0)
    for call in delta.get("tool_calls", []):
        del call["index"]  # of pieces only
    return {"role": "assistant", "content": None if message.calls and not content else content} | delta


def _delta(message: MessageDelta, num_calls: int) -> dict[str, Any]:
    """Return the new parts of a message as JSON, after a number of calls that were told before."""
    delta: dict[str, Any] = {}
    if message.reasoning:
        delta["reasoning_content"] = message.reasoning
    if message.content:
        delta["content"] = message.content
    if message.calls:
        delta["tool_calls"] = [
            {
                "index": index,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(message.calls, num_calls)
        ]
    return delta | dict(message.others)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def kind_of_error(status: int) -> str:
    """Return the type of an error, as OpenAI's API names it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    return kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
