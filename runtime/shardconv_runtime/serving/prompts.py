"""The tokens of a request's texts, which are made in a process of their own.

A chat template runs for as long as its arguments make it, and a tokenizer for as long as its text is.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Mapping
from typing import Any, Protocol

# Private, but it reads templates as transformers renders them.
from transformers.utils.chat_template_utils import _get_template_variables

from ..openai_api.chat_request import ChatRequest
from ..openai_api.schemas import BadRequest
from .bounded_calls import BoundedCalls, CallEndedError
from .grammars import Prepared


class TextRequest(Protocol):
    """A request with texts."""

    @property
    def has_text(self) -> bool:
        """Return whether there is a text, and not only token ids."""

    def token_ids(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each text."""


PROMPT_S = 5.0
"""Most processor time of the texts of a request."""
PROMPTS_AT_A_TIME = 4


async def token_ids(body: TextRequest, tokenizer: Any, calls: BoundedCalls | None) -> list[list[int]]:
    """Return the token ids of each prompt of a request."""
    if calls is None or not body.has_text:
        return prompt_ids(body, tokenizer)
    try:
        content = await calls.awaited(calls.call, packed_prompt_ids, body)
    except CallEndedError as error:
        raise BadRequest(
            f"the request's texts take more than {calls.cpu_s:g} s, or too much memory, to become tokens",
            next(name for name in ("messages", "prompt", "input") if hasattr(body, name)),
        ) from error
    numbers = array("q", content)
    lengths, prompts, begin = numbers[1 : 1 + numbers[0]], [], 1 + numbers[0]
    for length in lengths:
        prompts.append(numbers[begin : begin + length].tolist())
        begin += length
    return prompts


def packed_prompt_ids(prepared: Prepared, body: TextRequest) -> bytes:
    """Return ``prompt_ids`` as int64: the number of prompts, the length of each, and their ids."""
    prompts = prompt_ids(body, prepared.tokenizer)
    numbers = [len(prompts), *map(len, prompts)]
    return array("q", numbers + [token for prompt in prompts for token in prompt]).tobytes()


def prompt_ids(body: TextRequest, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of each prompt of a request."""
    if isinstance(body, ChatRequest) and body.template_arguments:
        require_template_variables(body.template_arguments, tokenizer, bool(body.shown_tools))
    try:
        return body.token_ids(tokenizer)
    except RecursionError as error:
        raise BadRequest("the request has too many levels") from error
    except (UnicodeError, TypeError, ValueError) as error:
        raise BadRequest(f"the text cannot be made into tokens: {error}") from error


def require_template_variables(arguments: Mapping[str, Any], tokenizer: Any, has_tools: bool) -> None:
    """Check that arguments for a chat template are variables that it reads, and nothing else gives it.

    Others would be options of ``apply_chat_template``: another template, padding, truncation.
    """
    template = tokenizer.get_chat_template(tools=[] if has_tools else None)
    options = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - _PASSED_ON
    free = _get_template_variables(template) - options - {"messages", *tokenizer.special_tokens_map}
    if refused := sorted(arguments.keys() - free):
        raise BadRequest(
            f"the chat template takes no {', '.join(refused)} from a request; "
            + (f"it takes {', '.join(sorted(free))}" if free else "it takes no arguments"),
            "chat_template_kwargs",
        )
    if not isinstance(arguments.get(_PROMPT, True), bool):
        raise BadRequest(f"{_PROMPT} is true or false", "chat_template_kwargs")


_PROMPT = "add_generation_prompt"
_PASSED_ON = frozenset({_PROMPT, "documents", "kwargs"})
"""Options of ``apply_chat_template`` that it only passes on to the template."""
