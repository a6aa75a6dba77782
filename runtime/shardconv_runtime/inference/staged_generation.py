"""``generate`` on the stages of a pipeline: each runs the same loop on the tokens that the last one chooses.

The last stage alone has the logits. Where a call chooses one token for each sequence from them, greedily or
by drawing, it chooses there, and the tokens are sent: B numbers in place of B times the vocabulary. Other
ways of decoding (beams, returned scores, a user's own processors and criteria) get the logits on each stage.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ..comm.stage_link import StageLink

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
    """The model's own ``generate``; the stages choose tokens together."""
    link.depth += 1
    try:
        if args or any(kwargs.get(name) is not None for name in _READ_SCORES):
            return type(model).generate(model, *args, **kwargs)
        model._get_logits_processor = MethodType(_processors(link), model)
        return type(model).generate(model, **kwargs)
    finally:
        vars(model).pop("_get_logits_processor", None)
        link.shares_results = True
        link.depth -= 1


def _processors(link: StageLink) -> Any:
    """A model's ``_get_logits_processor``, private, but whatever is done to scores passes through it."""

    def processors(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        found = type(self)._get_logits_processor(self, generation_config, *args, **kwargs)
        if _chooses_alone(generation_config):
            link.shares_results = False
            found.append(_TokensOfLastStage(link, draws=generation_config.do_sample))
        return found

    return processors


def _chooses_alone(config: Any) -> bool:
    """Whether a call chooses one token for each sequence, and returns nothing else."""
    returned = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    mode = config.get_generation_mode().value
    return mode in ("greedy_search", "sample") and not any(getattr(config, name, None) for name in returned)


class _TokensOfLastStage:
    """The last processor of scores: those of the tokens that the last stage chose.

    Args:
        link: to the other stages.
        draws: choose by drawing, as ``generate`` would next, from the same random state.
    """

    def __init__(self, link: StageLink, *, draws: bool) -> None:
        self._link = link
        self._draws = draws

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Zero for the chosen token of each sequence, else minus infinity, ``[B, V]``, on each stage."""
        tokens = torch.zeros(scores.shape[0], dtype=torch.int64, device=scores.device)
        if self._link.is_last:
            tokens = self._chosen(scores)
        self._link.share([tokens])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def _chosen(self, scores: Tensor) -> Tensor:
        if not self._draws:
            return scores.argmax(-1)
        devices = [scores.device] if scores.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # the caller draws once more, on every stage
            return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
