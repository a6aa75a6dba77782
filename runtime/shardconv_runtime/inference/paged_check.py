"""Checks that a model computes the same from pages: its first prompts are computed both ways.

A packed call gives the model its sequences end to end, with positions and a mask, and another attention
function. Code that looks at the order of tokens in any other way, or gives that function more than it takes
(a cap of scores, a bias), would be silently wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import PlanError, ShardconvError
from ..parallel.row_ids import is_recorded, require_in_table

# Requests of continuous batching that a model cannot answer, or not with others, are refused at once.
#
# Some rotary embeddings change with the largest position of a call. In a packed call that is the position of
# another request, or of a part of a prompt, so that a request would get other angles than by itself.


def length_limit(config: Any) -> int | None:
    """Return the most tokens of a sequence before a rotary embedding changes; None if none ever does.

    Args:
        config: transformers' config.
    """
    text = config.get_text_config(decoder=True)
    given = getattr(text, "rope_parameters", None) or {}
    kinds = [each for each in given.values() if isinstance(each, Mapping)] or [given]
    limits = []
    for parameters in kinds:
        kind = str(parameters.get("rope_type"))
        if kind == "longrope":
            trained = getattr(text, "original_max_position_embeddings", None)
            trained = parameters.get("original_max_position_embeddings") or trained
            limits.append(trained or text.max_position_embeddings)
        elif "dynamic" in kind:
            limits.append(text.max_position_embeddings)
    return min(limits, default=None)


@dataclass(frozen=True)
class RequestCheck:
    """The limits of a model's requests; made once, since requests are added while others are answered."""

    rows: int | None
    """The global number of rows of the input embedding; None if it has none."""
    limit: int | None
    """See ``length_limit``."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return the check of a loaded model."""
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
        return cls(rows, length_limit(model.config))

    def require(self, prompt: Sequence[int], max_new_tokens: int | None) -> None:
        """Check a request.

        Args:
            prompt: token ids.
            max_new_tokens: None: as many as there is room for.

        Raises:
            ShardconvError: the prompt is empty, has ids that the model has not (with which other requests
                would fail), or is so long that a rotary embedding changes.
        """
        if not len(prompt):
            raise ShardconvError("a prompt without tokens cannot be continued")
        if self.rows is not None:
            require_in_table(int(min(prompt)), int(max(prompt)), self.rows, "the model")
        num_new = 1 if max_new_tokens is None else max_new_tokens
        # The last new token is not computed with.
        if self.limit is not None and len(prompt) + num_new - 1 > self.limit:
            raise ShardconvError(
                f"a request for {len(prompt)} tokens and {num_new} new ones exceeds {self.limit} tokens. "
                "Longer texts change the model's rotary embedding for all tokens of a call, also for "
                "other requests; ask for fewer, or use generate"
            )


ENOUGH_TOKENS = 64
"""A prompt of this length has shown it. Until one comes, those twice as long as any before are compared."""

MOST_TOKENS = 1024
"""Longest prompt that is computed once more."""

MOST_CALLS = 32

PREFIX = "paged|"
"""Prefix of transformers' names of attention functions that read pages."""


class PagedCheck:
    """Compares the logits of prompts between packed calls and ordinary calls.

    Args:
        agreed: takes a number, and returns on every rank the number of a rank that has the logits.
    """

    def __init__(self, agreed: Callable[[float], float] = float) -> None:
        self._agreed = agreed
        self._num_tokens = 0
        self._num_times = 1
        """How many times as long as the shortest prompt of a call a sequence was, when that was compared."""
        self._num_calls = 0

    def compare(self, model: Any, inputs: Mapping[str, Any], logits: Tensor) -> None:
        """Compare the longest prompt that begins in a packed call, if it is longer than those before, and the
        shortest one next to longer sequences, for which code may compute something else.

        Args:
            model: the model of this rank.
            inputs: the inputs of the packed call; the same on all ranks.
            logits: its results, ``[1, T, V]`` for all tokens or only for ``logits_indices``.

        Raises:
            PlanError: the logits differ; on all ranks.
        """
        if self._num_calls >= MOST_CALLS or is_recorded(logits):
            return
        self._num_calls += 1
        prompts = [prompt for prompt in _prompts(inputs) if prompt[1] - prompt[0] <= MOST_TOKENS]
        if not prompts:
            return
        shortest, longest = prompts[0], prompts[-1]
        num_tokens = longest[1] - longest[0]
        is_longer = self._num_tokens < ENOUGH_TOKENS and num_tokens > 2 * self._num_tokens
        if is_longer and self._compare(model, inputs, logits, longest):
            self._num_tokens = num_tokens
        num_times = (int(inputs["position_ids"].max()) + 1) // (shortest[1] - shortest[0])
        if num_times >= 2 * self._num_times and self._compare(model, inputs, logits, shortest):
            self._num_times = num_times

    def _compare(
        self, model: Any, inputs: Mapping[str, Any], logits: Tensor, prompt: tuple[int, int]
    ) -> bool:
        """Return whether this could be done: logits that are not numbers show nothing, and fail when read."""
        start, stop = prompt
        row = stop - 1
        if logits.shape[1] != inputs["input_ids"].shape[1]:  # only those that are asked for were computed
            row = inputs["logits_indices"].tolist().index(row)
        got = logits[0, row].float()
        want = _ordinary_logits(model, inputs["input_ids"][:, start:stop])
        error = self._agreed(float((got - want).norm() / want.norm()))
        # In low precision rounding also sends tokens to other experts.
        if error > (1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.1):
            longest = int(inputs["position_ids"].max()) + 1
            raise PlanError(
                f"{type(model).__name__} does not support continuous batching with the attention "
                f"{model.config._attn_implementation!r}: for a prompt of {stop - start} tokens, next to "
                f"sequences of up to {longest}, its logits from pages differ by {error:.1%} from an ordinary "
                "call; use generate"
            )
        return math.isfinite(error)


def _prompts(inputs: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Start and stop of the prompts that begin here and whose last logits are asked for, shortest first."""
    ends = inputs["cu_seq_lens_q"].tolist()
    positions, asked = inputs["position_ids"][0].tolist(), set(inputs["logits_indices"].tolist())
    prompts = [
        (start, stop)
        for start, stop in pairwise(ends)
        if stop > start and positions[start] == 0 and stop - 1 in asked
    ]
    return sorted(prompts, key=lambda prompt: prompt[1] - prompt[0])


def _ordinary_logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of the last token of ``ids: [1, S]``, float32 ``[V]``."""
    keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    with ordinary_attention(model):
        logits: Tensor = model._call_impl(input_ids=ids, use_cache=False, **keep).logits
    return logits[0, -1].float()


@contextmanager
def ordinary_attention(model: Any) -> Generator[None]:
    """Let a model compute attention without pages within this context."""
    paged = model.config._attn_implementation
    name = str(paged).removeprefix(PREFIX)
    if name == paged:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(paged)
