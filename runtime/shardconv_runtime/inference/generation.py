"""``generate`` on every rank: the same call, the same tokens, the end at the same step.

The gathered logits are the same bits on every rank, so ranks that continue from the same random state draw
the same tokens without control messages. Inputs, which could still differ, are compared before the first
step; a limit of time or a criterion of the user's is decided by rank 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..comm.agreement import exchange
from ..comm.mesh import Launch
from ..errors import PlanError

if TYPE_CHECKING:
    from ..comm.stage_link import StageLink

DECODER = "_shardconv_decoder"
"""Attribute of a compiled model: what decodes for it."""

BATCHED = ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch")
"""Methods of continuous batching."""


def prepare_generation(
    model: nn.Module, config: Any | None, start: Launch, gather_logits: bool, link: StageLink | None = None
) -> None:
    """Give the model its generation config, and keep the ranks in step in ``model.generate``.

    Args:
        model: of this rank; unchanged if it does not generate.
        config: the generation config of the directory from which it was loaded, if that has one.
        start: the ranks.
        gather_logits: if False, ``generate`` is refused.
        link: to the other stages of a pipeline; None where there is one stage. With several stages in each
            process ``generate`` is refused.
    """
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
        # Private, but every criterion passes through it, wherever it was set.
        from .assisted import candidates_of_rank_0
        from .stopping import criteria_of_rank_0

        if hasattr(model, "_get_candidate_generator"):
            candidates = MethodType(candidates_of_rank_0(start), model)
            model._get_candidate_generator = candidates  # type: ignore[assignment]
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
    """A method of continuous batching, whose code is imported when it is called."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        from .continuous_batching import prepare_batches

        prepare_batches(self, start, gather_logits, link)
        return getattr(self, name)(*args, **kwargs)

    return method


def _in_step(start: Launch, gather_logits: bool, link: StageLink | None) -> Callable[..., Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not gather_logits:
            raise PlanError("generate needs full logits; load the model with gather_logits=True")
        args, kwargs = _by_name(type(self).generate, args, kwargs)
        if start.world_size == 1:
            return _generate(self, args, kwargs)
        from ..comm.rng_states import share_rng_state
        from .assisted import with_draft
        from .deadline import deadline

        is_streamed, drafts = _check_same_call(start, args, kwargs)
        kwargs = with_draft(kwargs, drafts)
        share_rng_state(start)
        if is_streamed and kwargs.get("streamer") is None:
            kwargs["streamer"] = _SilentStreamer()
        try:
            with deadline(start), _printing_once(start, kwargs.get("streamer")):
                if link is None:
                    return _generate(self, args, kwargs)
                from .staged_generation import on_stages

                return on_stages(self, link, args, kwargs)
        except RuntimeError as error:
            from .lost_ranks import raise_lost_rank

            raise_lost_rank(error, start)
            raise

    return generate


def _generate(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's own ``generate``; of a compiled model, with the decoding method that suits the call."""
    decoder = vars(model).get(DECODER)
    if decoder is None or args:
        return type(model).generate(model, *args, **kwargs)
    with decoder.options_for(kwargs) as method:
        if method is not None:
            kwargs = {**kwargs, "custom_generate": method}
        return type(model).generate(model, **kwargs)


def _by_name(
    generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with positional arguments by name, for errors and to replace a streamer."""
    parameters = list(inspect.signature(generate).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names) or kwargs.keys() & set(names[: len(args)]):
        return args, kwargs  # Python raises, or the model's own generate takes them
    return (), dict(zip(names, args, strict=False)) | kwargs


def _check_same_call(
    start: Launch, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[bool, list[int | None]]:
    """Check that all ranks got the same call; whether some rank streams its tokens, and their draft models.

    Raises:
        LaunchError: the calls differ, or a rank was not called.
    """
    from ..comm.same_calls import compare_calls, digest
    from .assisted import ARGUMENT, vocabulary_of_draft

    given = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
    is_streamed = given.pop("streamer", None) is not None
    draft = vocabulary_of_draft(given.pop(ARGUMENT, None))
    digests = {name: digest(value) for name, value in given.items()}
    calls = exchange(start, (digests, is_streamed, draft), start.timeout_s)
    compare_calls("generate", [call for call, _, _ in calls])
    return any(streams for _, streams, _ in calls), [draft for _, _, draft in calls]


@contextmanager
def _printing_once(start: Launch, streamer: Any) -> Iterator[None]:
    """In this context a streamer that prints the text does so on rank 0 only.

    Every rank's streamer gets its tokens and its end, since some thread may wait for them. Only what
    ``TextStreamer`` prints would be a line for each rank.
    """
    from transformers import TextStreamer

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
