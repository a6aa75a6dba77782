"""Assisted decoding: all ranks take the candidates of rank 0, whose draft model may be on some ranks only.

Two ranks' drafts need not agree: they may differ in their last bits, and so in a token, or in their
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from ..comm.agreement import agree, exchange
from ..comm.mesh import Launch
from ..comm.rank_0 import share_rng_state
from ..errors import InputsDifferError, LaunchError, RanksTimeoutError, RefusedCallError

ARGUMENT = "assistant_model"


FAILED = -1
"""Instead of the number of candidates: rank 0 has none, and raises."""


def vocabulary_of_draft(draft: Any | None) -> int | None:
    """Return the vocabulary size of the draft models, which the ranks exchange."""
    return None if draft is None else int(draft.config.get_text_config().vocab_size)


def with_draft(kwargs: Mapping[str, Any], drafts: Sequence[int | None]) -> dict[str, Any]:
    """Return the arguments of ``generate``, with a proxy for the draft model on ranks that have none."""
    options = dict(kwargs)
    having = [rank for rank, draft in enumerate(drafts) if draft is not None]
    if not having:
        return options
    if drafts[0] is None:
        raise LaunchError(
            f"rank {having[0]} was given an {ARGUMENT}, and rank 0, whose candidates all ranks take, was not"
        )
    for rank in having:
        if drafts[rank] != drafts[0]:
            raise InputsDifferError(
                f"generate was called with another {ARGUMENT} on rank {rank} (vocabulary of {drafts[rank]}) "
                f"than on rank 0 ({drafts[0]})"
            )
    if options.get(ARGUMENT) is None:
        # ``generate`` reads only this from a draft model before it asks for candidates.
        vocabulary_size = drafts[0]
        options[ARGUMENT] = SimpleNamespace(config=PreTrainedConfig(vocab_size=vocabulary_size))
    return options


def candidates_of_rank_0(start: Launch) -> Callable[..., Any]:
    """Return a model's ``_get_candidate_generator``, for a draft model on rank 0 and perhaps others."""

    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        draft = kwargs.get(ARGUMENT)
        if draft is None:
            try:
                return type(self)._get_candidate_generator(self, *args, **kwargs)
            except OSError as missing:
                if not getattr(kwargs["generation_config"], "use_mtp", False):
                    raise
                raise RefusedCallError(
                    "use_mtp=True needs the weights of the layers that draft tokens, which a converted "
                    "directory does not hold; load the source checkpoint with load(SOURCE, plan=DIRECTORY), "
                    "or generate without use_mtp"
                ) from missing
        candidates, error = None, None
        if not isinstance(draft, SimpleNamespace):
            try:
                candidates = type(self)._get_candidate_generator(self, *args, **kwargs)
            except Exception as failure:  # if only this rank has a draft, the others would wait for it
                error = failure
        agree(start, error)
        # Raises ``PlanError`` if a draft works on the model's inner states, and some ranks have no draft.
        needs_states = exchange(
            start, None if candidates is None else bool(candidates.requires_model_outputs)
        )
        if True in needs_states and None in needs_states:
            raise RefusedCallError(
                f"this {ARGUMENT} works on states of the model itself; load it on all ranks, not on "
                f"{needs_states.count(False) + needs_states.count(True)} of {len(needs_states)}"
            )
        return _Candidates(candidates, start, is_sampling=bool(kwargs["generation_config"].do_sample))

    return get


class _Candidates:
    """A candidate generator of transformers' form; tokens that follow ``[1, S]``."""

    def __init__(self, own: Any | None, start: Launch, is_sampling: bool) -> None:
        self._own = own
        self._start = start
        self._is_sampling = is_sampling
        self.requires_model_outputs = bool(getattr(own, "requires_model_outputs", False))
        self.model_kwargs_overrides = getattr(own, "model_kwargs_overrides", {})

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return rank 0's candidates ``[1, S + K]`` and their logits ``[1, K, V]`` or None on every rank."""
        ids: Tensor = input_ids
        logits: Any = None
        error: Exception | None = None
        if self._own is not None:
            try:
                ids, logits = self._own.get_candidates(input_ids, **kwargs)
            except Exception as failure:  # the others wait for the sizes
                error = failure
        new = ids[:, input_ids.shape[1] :].to(self._start.device)
        has_logits = self._is_sampling and logits is not None
        width = logits.shape[-1] if has_logits else 0
        # All ranks take the sizes of rank 0, and learn whether it failed.
        sizes = torch.tensor([new.shape[1] if error is None else FAILED, width], device=self._start.device)
        dist.broadcast(sizes, group_src=0, group=self._start.group)
        num_new, width = sizes.tolist()
        if error is not None:
            raise error
        if num_new == FAILED:
            raise RanksTimeoutError("rank 0 failed to draft candidates; its own output says why")
        new = self._of_rank_0(new, (1, num_new), torch.int64)
        joined = torch.cat([input_ids, new.to(input_ids.device)], 1)
        if not width:
            return joined, None
        drawn = self._of_rank_0(logits, (1, num_new, width), torch.float32)
        share_rng_state(self._start)  # drafts drew numbers, on ranks that have them
        return joined, drawn

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Tell this rank's draft how many candidates were right."""
        if self._own is not None:
            self._own.update_candidate_strategy(input_ids, scores, num_matches)

    def _of_rank_0(self, value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._start.rank == 0:
            assert value is not None, "rank 0 has a draft"
            sent = value.to(self._start.device, dtype).contiguous()
        else:
            sent = torch.empty(shape, dtype=dtype, device=self._start.device)
        dist.broadcast(sent, group_src=0, group=self._start.group)
        return sent
