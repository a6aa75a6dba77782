"""The JSON of a response of ``/v1/responses``, whole and as events."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from .answer_forms import AnswerPiece
from .message_parser import MessageDelta, ToolCall
from .responses_request import ResponsesRequest

LOG = logging.getLogger(__name__)
Event = dict[str, Any]


class ResponseForm:
    """The response to one request, see OpenAI's API; it has the methods of ``AnswerForm``.

    Attributes:
        last: the last piece of the answer, of which there is one.
    """

    def __init__(self, model: str, asked: ResponsesRequest, num_prompt_tokens: int) -> None:
        self._asked = asked
        self._num_prompt_tokens = num_prompt_tokens
        self._begin = time.perf_counter()
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._output: list[dict[str, Any]] = []
        """Items that are complete."""
        self._open: dict[str, Any] | None = None
        """The item of text or reasoning to which more is added."""
        self._num_events = 0
        self.headers = {"x-request-id": self._id}
        self.last: list[AnswerPiece | None] = [None]

    def seen(self, index: int, piece: AnswerPiece) -> AnswerPiece:
        """Note the last piece, and return it."""
        self.last[index] = piece
        return piece

    def log(self) -> None:
        """Log one line for the request."""
        last = self.last[0]
        LOG.info(
            "%s response: %d tokens of the prompt, %d new ones, %.2f s, %s",
            self._id,
            self._num_prompt_tokens,
            0 if last is None else last.num_tokens,
            time.perf_counter() - self._begin,
            (last.finish_reason if last is not None else None) or "canceled",
        )

    def whole(self, found: Sequence[Sequence[AnswerPiece]]) -> dict[str, Any]:
        """Return the response in one piece."""
        for piece in found[0]:
            for _ in self._added(piece):
                pass
        for _ in self._closed():
            pass
        return self._response(self._status())

    def events(self, index: int, piece: AnswerPiece) -> Iterator[str]:
        """Yield the events of a piece of the answer."""
        if self.last[index] is None:
            for kind in ("response.created", "response.in_progress"):
                yield self._event({"type": kind, "response": self._response("in_progress")})
        self.seen(index, piece)
        for event in self._added(piece):
            yield self._event(event)

    def last_events(self) -> Iterator[str]:
        """Yield the events at the end of the answer."""
        for event in self._closed():
            yield self._event(event)
        status = self._status()
        yield self._event({"type": f"response.{status}", "response": self._response(status)})

    def failure(self, message: str, status: int) -> str:
        """Return the event of an error in a stream that has begun."""
        code = "server_error" if status >= 500 else "invalid_prompt"
        response = self._response("failed") | {"error": {"code": code, "message": message}}
        return self._event({"type": "response.failed", "response": response})

    def _event(self, event: Event) -> str:
        event = event | {"sequence_number": self._num_events}
        self._num_events += 1
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    def _added(self, piece: AnswerPiece) -> Iterator[Event]:
        """Add a piece to the items; yield the events."""
        message = piece.message or MessageDelta(content=piece.text)
        if message.reasoning:
            yield from self._text("reasoning", message.reasoning)
        if message.content:
            yield from self._text("message", message.content)
        for call in message.calls:
            yield from self._call(call)

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        """Add text to the item of a kind, which may have to begin."""
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        if self._open is None or self._open["type"] != kind:
            yield from self._closed_item()
            part: dict[str, Any] = {"type": name, "text": ""}
            if kind == "reasoning":
                item: dict[str, Any] = {"type": kind, "id": f"rs_{uuid.uuid4().hex}", "summary": []}
            else:
                item = {"type": kind, "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
                part |= {"annotations": [], "logprobs": []}
            self._open = item | {"status": "in_progress", "content": [part]}
            yield self._of_item("response.output_item.added", item=self._open | {"content": []})
            yield self._of_part("response.content_part.added", part=dict(part))
        self._open["content"][0]["text"] += text
        yield self._of_part(f"response.{name}.delta", delta=text, **_logprobs(name))

    def _closed_item(self) -> Iterator[Event]:
        """End the item of text to which more could be added."""
        if self._open is None:
            return
        part = self._open["content"][0]
        name = part["type"]
        yield self._of_part(f"response.{name}.done", text=part["text"], **_logprobs(name))
        yield self._of_part("response.content_part.done", part=part)
        is_cut = self.last[0] is not None and self.last[0].finish_reason == "length"
        self._open["status"] = "incomplete" if is_cut else "completed"
        yield self._of_item("response.output_item.done", item=self._open)
        self._output.append(self._open)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._closed_item()
        item = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
        begun = item | {"arguments": "", "status": "in_progress"}
        done = item | {"arguments": call.arguments, "status": "completed"}
        yield self._of_item("response.output_item.added", item=begun)
        where = {"item_id": item["id"]}
        yield self._of_item("response.function_call_arguments.delta", delta=call.arguments, **where)
        yield self._of_item(
            "response.function_call_arguments.done", arguments=call.arguments, name=call.name, **where
        )
        yield self._of_item("response.output_item.done", item=done)
        self._output.append(done)

    def _closed(self) -> Iterator[Event]:
        """End the answer; one without anything is an empty text."""
        if self._open is None and not self._output:
            yield from self._text("message", "")
        yield from self._closed_item()

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": len(self._output), **fields}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return self._of_item(kind, content_index=0, item_id=self._open["id"], **fields)

    def _status(self) -> str:
        last = self.last[0]
        return "incomplete" if last is not None and last.finish_reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        asked, last = self._asked, self.last[0]
        usage = None
        if status in ("completed", "incomplete") and last is not None:
            usage = {
                "input_tokens": self._num_prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": last.num_cached_tokens or 0,
                    "cache_write_tokens": 0,
                },
                "output_tokens": last.num_tokens,
                "output_tokens_details": {"reasoning_tokens": last.num_reasoning_tokens},
                "total_tokens": self._num_prompt_tokens + last.num_tokens,
            }
        choice = asked.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": asked.reasoning.model_dump(),
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": asked.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in asked.tools],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": usage,
        }


def _logprobs(name: str) -> dict[str, Any]:
    """Return the field of events of output text that is always there."""
    return {"logprobs": []} if name == "output_text" else {}
