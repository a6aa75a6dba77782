"""From the logits of a step to its tokens, inside of the graph: the default processing of ``generate``.

The formulas are taken from transformers' logits processors. Their numbers are in tensors, so that other
numbers need no other graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

NUMBERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
    RepetitionPenaltyLogitsProcessor: "penalty",
    MinLengthLogitsProcessor: "min_length",
    MinNewTokensLengthLogitsProcessor: "min_new_tokens",
}
"""The processors that the graph has, and the attribute with the number of each. For top-p the graph keeps the
rest, which in float32 differs from one minus p. For a least length it keeps the number of new tokens."""

INTEGERS = ("top_k", "min_length", "min_new_tokens")
SMALLEST = ("min_length", "min_new_tokens")

_DEFAULTS = {"filter_value": -float("inf"), "min_tokens_to_keep": 1, "prompt_ignore_length": None}
"""Other attributes that a processor may have; one with other values is not in the graph."""


@dataclass(frozen=True)
class SamplingMode:
    """The choice of tokens, as far as it differs between graphs.

    Attributes:
        samples: draws tokens, otherwise takes the likeliest.
        numbers: names of processors' numbers, in the order in which they are applied.
        most: the largest ``top_k``, a power of two; 0 without one.
    """

    samples: bool
    numbers: tuple[str, ...] = ()
    most: int = 0


def choice_of(
    processors: Sequence[Any], samples: bool, prompt_length: int
) -> tuple[SamplingMode, dict[str, float]] | None:
    """Return how ``generate`` would choose, with the numbers; None if the graph has no such processor."""
    options: dict[str, float] = {}
    for processor in processors:
        name = NUMBERS.get(type(processor))
        is_default = all(getattr(processor, n, value) == value for n, value in _DEFAULTS.items())
        if name is None or name in options or not is_default:
            return None
        number = getattr(processor, name)
        if name == "top_p":
            number = 1 - number
        elif name == "min_length":
            number -= prompt_length
        options[name] = number
    most = 1 << (int(options.get("top_k", 0)) - 1).bit_length() if "top_k" in options else 0
    return SamplingMode(samples, tuple(options), most), options


@dataclass(frozen=True)
class History:
    """The text as processors know it.

    Attributes:
        count: tokens chosen so far, int64 ``[]``.
        seen: the ids that are in a row's text, bool ``[B, V + 1]``, for a repetition penalty; the last one is
            for ids that have no logit.
        stops: the ids that end a row, bool ``[V + 1]``, for a least length.
    """

    count: Tensor
    seen: Tensor | None
    stops: Tensor | None


def choose(choice: SamplingMode, logits: Tensor, numbers: dict[str, Tensor], history: History) -> Tensor:
    """Return the next token of each row.

    Args:
        logits: float32 ``[B, V]``.

    Returns:
        int64 ``[B]``.
    """
    for name in choice.numbers:
        logits = _processed(name, choice, logits, numbers[name], history)
    if not choice.samples:
        return logits.argmax(-1)
    return torch.multinomial(logits.softmax(-1), 1).squeeze(1)


def _processed(name: str, choice: SamplingMode, logits: Tensor, number: Tensor, history: History) -> Tensor:
    if name == "temperature":
        return logits / number
    if name == "penalty":
        assert history.seen is not None
        penalized = torch.where(logits < 0, logits * number, logits / number)
        return torch.where(history.seen[:, :-1], penalized, logits)
    if name in SMALLEST:
        assert history.stops is not None
        return logits.masked_fill(history.stops[:-1] & (history.count < number), -float("inf"))
    if name == "top_k":
        highest = logits.topk(min(choice.most, logits.shape[-1])).values
        last = (number.clamp(max=logits.shape[-1]) - 1).reshape(1)
        return logits.masked_fill(logits < highest.index_select(-1, last), -float("inf"))
    if name == "min_p":
        probabilities = logits.softmax(-1)
        least = number * probabilities.amax(-1, keepdim=True)
        return logits.masked_fill(probabilities < least, -float("inf"))
    assert name == "top_p"
    ascending, ids = logits.sort(-1)
    removed = ascending.softmax(-1).cumsum(-1) <= number
    is_last = torch.arange(logits.shape[-1], device=logits.device) == logits.shape[-1] - 1
    return logits.masked_fill(torch.zeros_like(removed).scatter(1, ids, removed & ~is_last), -float("inf"))
