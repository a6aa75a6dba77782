"""``generate`` on every rank: the same call, the same tokens, the end at the same step.

The gathered logits are the same bits on every rank, so ranks that continue from the same random state draw
the same tokens without control messages. Inputs, which could still differ, are compared before the first
step; a limit of time or a criterion of the user's is decided by rank 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, StoppingCriteriaList, TextStreamer, generation

from ..comm.agreement import agree, compare_calls, digest, exchange, share_rng_state
from ..comm.mesh import Launch
from ..errors import LaunchError, PlanError
from ..pp.stage_link import StageLink
from .continuous_batching import prepare_batches
from .deadline import deadline, progress, raise_lost_rank

# Assisted decoding: all ranks take the candidates of rank 0, whose draft model may be on some ranks only.
#
# Two ranks' drafts need not agree: they may differ in their last bits, and so in a token, or in their
# weights.


ARGUMENT = "assistant_model"

FAILED = -1
"""Instead of the number of candidates: rank 0 has none, and raises."""


def vocabulary_of_draft(draft: Any | None) -> int | None:
    """Return the vocabulary size of the draft models, which the ranks exchange."""
    return None if draft is None else int(draft.config.get_text_config().vocab_size)


def with_draft(kwargs: Mapping[str, Any], drafts: Sequence[int | None]) -> dict[str, Any]:
    """Return the arguments of ``generate``, with a proxy for the draft model on ranks that have none."""
    found = dict(kwargs)
    having = [rank for rank, draft in enumerate(drafts) if draft is not None]
    if not having:
        return found
    if drafts[0] is None:
        raise LaunchError(
            f"rank {having[0]} was given an {ARGUMENT}, and rank 0, whose candidates all ranks take, was not"
        )
    for rank in having:
        if drafts[rank] != drafts[0]:
            raise LaunchError(
                f"generate was called with another {ARGUMENT} on rank {rank} (vocabulary of {drafts[rank]}) "
                f"than on rank 0 ({drafts[0]})"
            )
    if found.get(ARGUMENT) is None:
        # ``generate`` reads only this from a draft model before it asks for candidates.
        vocabulary_size = drafts[0]
        found[ARGUMENT] = SimpleNamespace(config=PreTrainedConfig(vocab_size=vocabulary_size))
    return found


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
                raise PlanError(
                    "use_mtp=True needs the weights of the layers that draft tokens, which a converted "
                    "directory does not hold; load the source checkpoint with load(SOURCE, plan=DIRECTORY), "
                    "or generate without use_mtp"
                ) from missing
        own, error = None, None
        if not isinstance(draft, SimpleNamespace):
            try:
                own = type(self)._get_candidate_generator(self, *args, **kwargs)
            except Exception as failure:  # if only this rank has a draft, the others would wait for it
                error = failure
        agree(start, error)
        # Raises ``PlanError`` if a draft works on the model's inner states, and some ranks have no draft.
        needs_states = exchange(start, None if own is None else bool(own.requires_model_outputs))
        if True in needs_states and None in needs_states:
            raise PlanError(
                f"this {ARGUMENT} works on states of the model itself; load it on all ranks, not on "
                f"{needs_states.count(False) + needs_states.count(True)} of {len(needs_states)}"
            )
        return _Candidates(own, start, is_sampling=bool(kwargs["generation_config"].do_sample))

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
            raise LaunchError("rank 0 failed to draft candidates; its own output says why")
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


# ``generate`` on the stages of a pipeline: each runs the same loop on the tokens that the last one chooses.
#
# Only the last stage has the logits. If a call chooses one token for each sequence from them, greedily
# or by drawing, it chooses there, and the tokens are sent: B numbers in place of B times the vocabulary.
# Other ways of decoding (beams, returned scores, a user's own processors and criteria) get the logits on
# each stage.

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
        found = type(self)._get_logits_processor(self, generation_config, *args, **kwargs)
        returned = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        is_plain = generation_config.get_generation_mode().value in ("greedy_search", "sample")
        if is_plain and not any(getattr(generation_config, name, None) for name in returned):
            until_end.enter_context(link.keeping_results())
            found.append(_TokensOfLastStage(link, draws=generation_config.do_sample))
        return found

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


# Criteria that end generation at the same step on every rank.


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

        found = type(self)._get_stopping_criteria(self, *args, **kwargs)
        return Steps(c if isinstance(c, same_on_all_ranks) else _DecidedByRank0(c, start) for c in found)

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


def _refusal(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(
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
            raise PlanError("generate needs full logits; load the model with gather_logits=True")
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
        given = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
        is_streamed = given.pop("streamer", None) is not None
        draft = vocabulary_of_draft(given.pop(ARGUMENT, None))
        digests = {name: digest(value) for name, value in given.items()}
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
