"""``generate`` on every rank: the same call, the same tokens, the end at the same step.

The gathered logits are the same bits on every rank, so ranks that continue from the same random state draw
the same tokens without control messages. Inputs, which could still differ, are compared before the first
step; a limit of time or a criterion of the user's is decided by rank 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import StoppingCriteriaList, TextStreamer, generation

from ..comm.agreement import exchange
from ..comm.call_agreement import compare_calls, digest
from ..comm.deadline import deadline, progress, raise_lost_rank
from ..comm.mesh import Launch
from ..comm.rank_0 import share_rng_state
from ..errors import PlanError, RefusedCallError
from ..parallel.layers import without_gaps
from ..pp.stage_generation import on_stages
from ..pp.stage_link import StageLink
from .assisted_generation import ARGUMENT, candidates_of_rank_0, vocabulary_of_draft, with_draft
from .continuous_batching import prepare_batches


def criteria_of_rank_0(start: Launch) -> Callable[..., Any]:
    """Return ``_get_stopping_criteria`` with which rank 0 decides on criteria that ranks may differ in."""

    def criteria(self: Any, *args: Any, **kwargs: Any) -> Any:
        same_on_all_ranks = (
            generation.MaxLengthCriteria,
            generation.EosTokenCriteria,
            generation.StopStringCriteria,
            generation.ConfidenceCriteria,
        )

        class Steps(StoppingCriteriaList):  # type: ignore[misc]
            """Called once a step, with every method of generating."""

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                progress()
                return super().__call__(*args, **kwargs)

        stopping = type(self)._get_stopping_criteria(self, *args, **kwargs)
        return Steps(c if isinstance(c, same_on_all_ranks) else _DecidedByRank0(c, start) for c in stopping)

    return criteria


class _DecidedByRank0:
    """A criterion that may differ between ranks, such as one with a clock: rank 0 decides."""

    def __init__(self, criterion: Callable[..., Any], start: Launch) -> None:
        self._criterion = criterion
        self._start = start

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return finished sequences, bool ``[B]``, from ``input_ids: [B, S]``; a broadcast of B bytes."""
        done = torch.zeros(input_ids.shape[0], dtype=torch.uint8, device=self._start.device)
        if self._start.rank == 0:
            done += torch.as_tensor(self._criterion(input_ids, scores, **kwargs)).to(done)
        dist.broadcast(done, group_src=0, group=self._start.group)
        return done.to(input_ids.device, torch.bool)


DECODER = "_shardconv_decoder"
"""Attribute of a compiled model with its decoder."""

BATCHED = ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch")
"""Methods of continuous batching."""


def prepare_generation(
    model: nn.Module, config: Any | None, start: Launch, gather_logits: bool, link: StageLink | None = None
) -> None:
    """Give the model its generation config, and keep the ranks in step in ``model.generate``."""
    if not hasattr(model, "generate"):
        return
    if config is not None:
        model.generation_config = config
    if link is not None and len(link.stages) > 1:
        for name in ("generate", *BATCHED):
            if hasattr(model, name):
                setattr(model, name, MethodType(_refusal(name), model))
        return
    model.generate = MethodType(_in_step(start, gather_logits, link), model)  # type: ignore[assignment]
    if start.world_size > 1:
        if hasattr(model, "_get_candidate_generator"):
            candidates = MethodType(candidates_of_rank_0(start), model)
            model._get_candidate_generator = candidates  # type: ignore[assignment]
        # Private, but every criterion passes through it, wherever it was set.
        model._get_stopping_criteria = MethodType(criteria_of_rank_0(start), model)  # type: ignore[assignment]
    for name in BATCHED:
        if hasattr(model, name):
            setattr(model, name, MethodType(_batched(name, start, gather_logits, link), model))
    head_of = getattr(model, "get_output_embeddings", None)
    head = head_of() if callable(head_of) else None
    if type(head) is nn.Linear and start.device.type == "cpu":  # sharded ones do it themselves
        head.register_forward_pre_hook(_copy_views)


def _copy_views(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(without_gaps, inputs))


def _refusal(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RefusedCallError(
            f"{name} is for models with one stage in each process; load this one without stages_per_process"
        )

    return method


def _batched(name: str, start: Launch, gather_logits: bool, link: StageLink | None) -> Callable[..., Any]:
    """Return a method of continuous batching, which first prepares the model for it."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare_batches(self, start, gather_logits, link)
        return getattr(self, name)(*args, **kwargs)

    return method


def _in_step(start: Launch, gather_logits: bool, link: StageLink | None) -> Callable[..., Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not gather_logits:
            raise RefusedCallError("generate needs full logits; load the model with gather_logits=True")
        # Positional arguments get their names, for errors and to replace a streamer.
        parameters = list(inspect.signature(type(self).generate).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        # Python raises an error for other arguments, or the model's own generate takes them.
        if len(args) <= len(names) and not kwargs.keys() & set(names[: len(args)]):
            args, kwargs = (), dict(zip(names, args, strict=False)) | kwargs
        if kwargs.get("cache_implementation") == "paged":
            raise PlanError(
                "cache_implementation='paged' makes generate a call of generate_batch; call that one: "
                "model.generate_batch(prompts, generation_config), with a list of token ids for each prompt, "
                "without padding and attention_mask"
            )
        if start.world_size == 1:
            return _generate(self, args, kwargs)

        # Check that all ranks got the same call; whether some rank streams its tokens, and their draft
        # models.
        arguments = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
        is_streamed = arguments.pop("streamer", None) is not None
        draft = vocabulary_of_draft(arguments.pop(ARGUMENT, None))
        digests = {name: digest(value) for name, value in arguments.items()}
        calls = exchange(start, (digests, is_streamed, draft), start.timeout_s, "generate")
        compare_calls("generate", [call for call, _, _ in calls])
        is_streamed, drafts = any(streams for _, streams, _ in calls), [draft for _, _, draft in calls]
        kwargs = with_draft(kwargs, drafts)
        share_rng_state(start)
        if is_streamed and kwargs.get("streamer") is None:
            kwargs["streamer"] = _SilentStreamer()
        try:
            with deadline(start), _printing_once(start, kwargs.get("streamer")):
                if link is None:
                    return _generate(self, args, kwargs)

                return on_stages(self, link, args, kwargs)
        except RuntimeError as error:
            raise_lost_rank(error, start)
            raise

    return generate


def _generate(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the model's own ``generate``, with the decoding method of a compiled model."""
    decoder = vars(model).get(DECODER)
    if decoder is None or args:
        return type(model).generate(model, *args, **kwargs)
    with decoder.options_for(kwargs) as method:
        if method is not None:
            kwargs = {**kwargs, "custom_generate": method}
        return type(model).generate(model, **kwargs)


@contextmanager
def _printing_once(start: Launch, streamer: Any) -> Iterator[None]:
    """Let a streamer that prints the text do so on rank 0 only within this context.

    Every rank's streamer gets its tokens and its end, since some thread may wait for them. Only
    ``TextStreamer`` prints, and would print a line for each rank.
    """
    prints = isinstance(streamer, TextStreamer) and (
        getattr(streamer.on_finalized_text, "__func__", None) is TextStreamer.on_finalized_text
    )
    if not prints or not start.rank:
        yield
        return
    streamer.on_finalized_text = lambda text, stream_end=False: None
    try:
        yield
    finally:
        del streamer.on_finalized_text


class _SilentStreamer:
    """The streamer of ranks without one: with it, ``generate`` takes the same path as on ranks with one."""

    def put(self, value: Tensor) -> None:
        """Ignore the tokens."""

    def end(self) -> None:
        """Ignore the end."""
