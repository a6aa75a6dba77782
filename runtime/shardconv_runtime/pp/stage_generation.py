"""``generate`` on the stages of a pipeline: each runs the same loop on the tokens that the last one chose.

Only the last stage has the logits. If a call chooses one token for each sequence from them, greedily
or by drawing, it chooses there, and the tokens are sent: B numbers in place of B times the vocabulary.
Other ways of decoding (beams, returned scores, a user's own processors and criteria) get the logits on
each stage.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from .stage_link import StageLink

_READ_SCORES = (
    "logits_processor",
    "stopping_criteria",
    "assistant_model",
    "custom_generate",
    "prefix_allowed_tokens_fn",
    "stop_strings",
)
"""Arguments of ``generate`` whose code may read scores on each stage."""


def on_stages(model: Any, link: StageLink, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the model's own ``generate``; the stages choose tokens together."""
    with link.calling(), ExitStack() as until_end:
        if args or any(kwargs.get(name) is not None for name in _READ_SCORES):
            return type(model).generate(model, *args, **kwargs)
        model._get_logits_processor = MethodType(_processors(link, until_end), model)
        until_end.callback(vars(model).pop, "_get_logits_processor", None)
        return type(model).generate(model, **kwargs)


def _processors(link: StageLink, until_end: ExitStack) -> Any:
    """Return a model's ``_get_logits_processor``, private, but all processing of scores passes through it.

    It is the first to know how the call chooses its tokens.
    """

    def processors(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        processors_of_rank = type(self)._get_logits_processor(self, generation_config, *args, **kwargs)
        returned = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        is_plain = generation_config.get_generation_mode().value in ("greedy_search", "sample")
        if is_plain and not any(getattr(generation_config, name, None) for name in returned):
            until_end.enter_context(link.keeping_results())
            processors_of_rank.append(_TokensOfLastStage(link, draws=generation_config.do_sample))
        return processors_of_rank

    return processors


class _TokensOfLastStage:
    """The last processor of scores, which selects the tokens that the last stage chose."""

    def __init__(self, link: StageLink, *, draws: bool) -> None:
        self._link = link
        self._draws = draws

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return 0 for the chosen token of each sequence and -inf for others, ``[B, V]``, on each stage."""
        tokens = torch.zeros(scores.shape[0], dtype=torch.int64, device=scores.device)
        if self._link.is_last and not self._draws:
            tokens = scores.argmax(-1)
        elif self._link.is_last:
            devices = [scores.device] if scores.device.type == "cuda" else []
            with torch.random.fork_rng(devices):  # the caller draws once more, on every stage
                tokens = torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        self._link.share([tokens])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)
