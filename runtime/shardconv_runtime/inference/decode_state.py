"""Tensors that decoding steps read and write, which stay where they are from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..parallel.boundary import CACHE_ARGUMENTS, given_cache
from .decode_cache import Buffers, OneTokenCache, repeat_first
from .sampling import INTEGERS, SMALLEST, History, SamplingMode, choice_of

MOST_STOP_TOKENS = 32


@dataclass(frozen=True)
class Bucket:
    """Shapes of a step's tensors, and the options of its graph.

    Attributes:
        batch: number of rows, B; a call may have fewer.
        slots: number of tokens, L; the memory is for this many.
        reach: number of slots that a step reads, R, at most ``slots``; the text so far fits into them.
        rings: whether layers with windows hold only the tokens of their window.
        inputs: names of the model's tensor arguments in addition to the ids.
        constants: the model's other arguments.
        choice: how tokens are chosen.
        stops: there are tokens that end a row.
    """

    batch: int
    slots: int
    reach: int
    rings: bool
    inputs: tuple[tuple[str, torch.dtype], ...]
    constants: tuple[tuple[str, Any], ...]
    choice: SamplingMode
    stops: bool


@dataclass(eq=False)
class StepState:
    """The tensors of one bucket.

    Attributes:
        bucket: shapes.
        cache_name: the model's argument for the cache.
        cache: the cache of the tokens so far.
        token: the ids that the next step takes, int64 ``[B, 1]``.
        new_tokens: the chosen tokens, int64 ``[B, L]``, and ``count`` (``[]``) of them.
        position_ids: the position of ``token``, int64 ``[B, 1]``, if the model takes it.
        inputs: other tensor arguments by name: masks ``[B, R]`` and types of tokens ``[B, 1]``, constant.
        masks: the masks among these inputs, with all slots, ``[B, L]``.
        unfinished: 1 for rows that no stop token has ended, int64 ``[B]``.
        done: whether there are none, bool ``[]``.
        pad: id that follows a stop token, int64 ``[]``.
        stop_ids: int64 ``[MOST_STOP_TOKENS]``, -1 if there are fewer.
        numbers: the numbers of the processors, by name.
        seen, stops: see ``History``.
    """

    bucket: Bucket
    cache_name: str
    cache: OneTokenCache
    token: Tensor
    new_tokens: Tensor
    count: Tensor
    unfinished: Tensor
    done: Tensor
    pad: Tensor
    stop_ids: Tensor
    position_ids: Tensor | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Tensor] = field(default_factory=dict)
    seen: Tensor | None = None
    stops: Tensor | None = None

    def history(self) -> History:
        """Return the text as processors know it."""
        return History(self.count, self.seen, self.stops)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``prepare_inputs_for_generation`` other than the ids."""
        given: dict[str, Any] = {self.cache_name: self.cache, **self.inputs, **dict(self.bucket.constants)}
        if self.position_ids is not None:
            given["position_ids"] = self.position_ids
        return given

    def append(self, tokens: Tensor) -> None:
        """Add the chosen tokens ``[B]``; a row that has ended gets padding. In place throughout."""
        if self.bucket.stops:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        self.token.copy_(tokens[:, None])
        self.new_tokens.index_copy_(1, self.count.reshape(1), tokens[:, None])
        self.count.add_(1)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        if self.bucket.stops:
            self.unfinished.mul_(1 - torch.isin(tokens, self.stop_ids).to(torch.int64))
            self.done.copy_(self.unfinished.max() == 0)

    def reaching(self, reach: int) -> StepState:
        """Return the same state, whose steps read more slots: all tensors keep their places."""
        inputs = self.inputs | {name: mask[:, :reach] for name, mask in self.masks.items()}
        bucket, cache = replace(self.bucket, reach=reach), self.cache.reaching(reach)
        return replace(self, bucket=bucket, cache=cache, inputs=inputs)

    @contextmanager
    def kept(self, num_steps: int) -> Iterator[None]:
        """Run this many steps from rewound counters within this context; then the state is as before."""
        own = (self.token, self.new_tokens, self.count, self.unfinished, self.done, self.cache.length)
        more = (x for x in (self.position_ids, self.seen) if x is not None)
        tensors = [*own, *more, *self.cache.written(num_steps)]
        copies = [tensor.clone() for tensor in tensors]
        yield
        for tensor, before in zip(tensors, copies, strict=True):
            tensor.copy_(before)

    def rewind(self) -> None:
        """Let the next steps write within the buffers, independent of their contents."""
        for counter in (self.cache.length, self.count, self.position_ids):
            if counter is not None:
                counter.zero_()

    def advance(self) -> None:
        """Count the token that the model has taken."""
        self.cache.length.add_(1)
        if self.position_ids is not None:
            self.position_ids.add_(1)


def make_state(
    bucket: Bucket, cache_name: str, cache: OneTokenCache, buffers: Buffers, vocabulary: int
) -> StepState:
    """Return the tensors of a bucket, of undefined content."""
    batch, slots = bucket.batch, bucket.slots

    def ints(name: str, *shape: int) -> Tensor:
        return buffers.get(name, shape, torch.int64)

    state = StepState(
        bucket,
        cache_name,
        cache,
        ints("token", batch, 1),
        ints("new_tokens", batch, slots),
        ints("count"),
        ints("unfinished", batch),
        buffers.get("done", (), torch.bool),
        ints("pad"),
        ints("stop_ids", MOST_STOP_TOKENS),
    )
    for name, dtype in bucket.inputs:
        if name == "position_ids":
            state.position_ids = buffers.get(name, (batch, 1), dtype)
        else:
            is_mask = name == "attention_mask"
            found = buffers.get(name, (batch, slots if is_mask else 1), dtype)
            state.inputs[name] = found[:, : bucket.reach] if is_mask else found
            if is_mask:
                state.masks[name] = found
    for name in bucket.choice.numbers:
        dtype = torch.int64 if name in INTEGERS else torch.float32
        state.numbers[name] = buffers.get(f"number {name}", (), dtype)
    if "penalty" in bucket.choice.numbers:
        state.seen = buffers.get("seen", (batch, vocabulary + 1), torch.bool)
    if any(name in bucket.choice.numbers for name in SMALLEST):
        state.stops = buffers.get("stops", (vocabulary + 1,), torch.bool)
    return state


def start_call(
    state: StepState,
    ids: Tensor,
    arguments: dict[str, Any],
    numbers: dict[str, float],
    pad: Tensor | None,
    stop_ids: Tensor | None,
) -> None:
    """Set all but the cache for a call.

    Args:
        ids: the prompt, int64 ``[rows, n]``.
    """
    rows = len(ids)
    state.count.zero_()
    state.unfinished.zero_()
    state.unfinished[:rows] = 1
    state.done.zero_()
    state.pad.copy_(pad.reshape(()) if pad is not None else state.pad.new_zeros(()))
    state.stop_ids.fill_(-1)
    if stop_ids is not None:
        state.stop_ids[: stop_ids.numel()] = stop_ids.reshape(-1)
    if state.position_ids is not None:
        _fill_rows(state.position_ids, arguments["position_ids"][..., -1:])
    for name, tensor in state.inputs.items():
        if name in state.masks:
            mask = state.masks[name]
            mask.fill_(1)  # for tokens to come; later positions are masked as such
            _fill_rows(mask[:, : arguments[name].shape[1]], arguments[name])
        else:
            _fill_rows(tensor, arguments[name][..., -1:])
    for name, number in numbers.items():
        state.numbers[name].fill_(number)
    if state.seen is not None:
        state.seen.zero_()
        state.seen[:rows].scatter_(1, ids.clamp(max=state.seen.shape[1] - 1), True)
        repeat_first(state.seen, rows)
    if state.stops is not None:
        state.stops.zero_()
        assert stop_ids is not None, "a least length is about what ends a row"
        state.stops[stop_ids.reshape(-1).clamp(max=len(state.stops) - 1)] = True


def _fill_rows(buffer: Tensor, found: Tensor) -> None:
    buffer[: len(found)] = found.expand(len(found), buffer.shape[1])
    repeat_first(buffer, len(found))


# A call of ``generate`` as transformers has prepared it, if one graph can decode it step by step.

# Attention of a decoding step, in which each row has one query and the cache is read once.
#
# In a compiled call with a mask, such as a decoding step, transformers repeats keys and values for all heads
# of a group before it calls ``scaled_dot_product_attention``. The repeated cache is written to memory and
# read again: with 4 query heads for each key head, a step moves nine times the bytes of its cache. Here the
# heads of a group are the rows of one matrix, which is multiplied with the cache as it lies in memory.
#
# The form is two products and a softmax. Kernels for prefills give the keys of one head to one
# multiprocessor, which takes long over a long text; products share them among all multiprocessors. gpt-fast
# decodes in this form for the same reason (https://github.com/pytorch-labs/gpt-fast).

ORDINARY = "sdpa"
NAME = "shardconv_decode"
"""Name of this attention function in the registries of transformers."""

_MODIFIERS = ("softcap", "position_bias", "s_aux", "cache")
"""Arguments that change the scores, or where keys come from. Such calls are left to the ordinary function."""


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend from one query for each row; an attention function of transformers.

    Args:
        query: local ``[B, H, 1, D]``; its head ``h`` attends to key head ``h * G // H``.
        key: local ``[B, G, L, D]``.
        value: local ``[B, G, L, E]``.

    Returns:
        local ``[B, 1, H, E]``, and None for the weights.
    """
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    if length != 1 or dropout or heads % groups or any(kwargs.get(name) is not None for name in _MODIFIERS):
        ordinary = ALL_ATTENTION_FUNCTIONS[ORDINARY]
        found: tuple[Tensor, Tensor | None] = ordinary(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    grouped = query.reshape(batch, groups, heads // groups, width)
    scores = (grouped * (width**-0.5 if scaling is None else scaling)) @ key.transpose(-1, -2)
    # Sums of many small numbers lose too much in half precision.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if attention_mask is not None:
        mask = attention_mask
        if mask.shape[1] != 1:  # one mask for each head
            mask = mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[-1])
        lowest = torch.finfo(scores.dtype).min  # not -inf: a row that sees nothing stays finite
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).to(value.dtype)
    return (weights @ value).reshape(batch, 1, heads, value.shape[-1]), None


@contextmanager
def attending_once(model: nn.Module) -> Iterator[None]:
    """Use ``decode_attention`` in place of sdpa in calls of a model within this context."""
    configs = {id(c): c for c in _configs(model) if c._attn_implementation == ORDINARY}
    for config in configs.values():
        _set(config, NAME)
    try:
        yield
    finally:
        for config in configs.values():
            _set(config, ORDINARY)


def _configs(model: nn.Module) -> Iterator[Any]:
    """Yield the configs that modules look at for the name of their attention function."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            yield config


def _set(config: Any, name: str) -> None:
    # Private: the setter of the public name would also set the configs of other parts of the model.
    config._attn_implementation_internal = name


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[ORDINARY])


OTHER_WAYS = (
    "custom_generate",
    "assistant_model",
    "assistant_tokenizer",
    "tokenizer",
    "synced_gpus",
    *CACHE_ARGUMENTS,
)
"""Arguments of ``generate`` with which it decodes in another way, or continues a cache of the caller's."""

NOT_OPTIONS = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "trust_remote_code",
    *OTHER_WAYS,
)
"""Arguments of ``generate`` that are not options of its config."""


def options_of(model: Any, arguments: dict[str, Any]) -> Any:
    """Return the generation config of a call of ``model.generate``."""
    given = {name: value for name, value in arguments.items() if name not in NOT_OPTIONS}
    # Private, but nothing public tells how the arguments and two configs go together.
    options, _ = model._prepare_generation_config(arguments.get("generation_config"), **given)
    return options


def may_take(arguments: dict[str, Any], options: Any) -> bool:
    """Return whether a call of ``generate`` may be decoded here; more is known once it is prepared."""
    return (
        all(arguments.get(name) is None for name in OTHER_WAYS)
        and options.get_generation_mode(None) in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        and not options.return_dict_in_generate
        and not options.stop_strings
    )


@dataclass(frozen=True)
class Call:
    """A call that can be decoded here.

    Attributes:
        ids: the prompt, int64 ``[rows, n]``; n is 0 if embeddings are given in its place.
        config: the config of the generation.
        arguments: the arguments of the model.
        cache_name: the argument that is the cache; it is empty.
        most_new: tokens to add at most.
        choice: how they are chosen.
        numbers: the numbers of the logits processors.
        pad: id of padding, and ``stop_ids`` that end a row; None if nothing does.
    """

    ids: Tensor
    config: Any
    arguments: dict[str, Any]
    cache_name: str
    most_new: int
    choice: SamplingMode
    numbers: dict[str, float]
    pad: Tensor | None
    stop_ids: Tensor | None


def prepared_call(
    ids: Tensor, processors: Any, criteria: Any, config: Any, arguments: dict[str, Any]
) -> Call | None:
    """Return a call as ``generate`` hands it to a decoding method; None if it is decoded in another way."""
    cache_name = given_cache(arguments)
    chosen = choice_of(processors, config.do_sample, ids.shape[-1])
    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    stops = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
    if cache_name is None or chosen is None or len(lengths) + len(stops) != len(criteria):
        return None
    if len(lengths) != 1 or len(stops) > 1 or not arguments.get("use_cache") or ids.dim() != 2:
        return None
    cache = arguments[cache_name]
    if type(cache) not in (DynamicCache, StaticCache) or getattr(cache, "offloading", False):
        return None
    stop_ids = torch.as_tensor(stops[0]).to(ids.device) if stops else None
    pad = config._pad_token_tensor
    if stop_ids is not None and (pad is None or stop_ids.numel() > MOST_STOP_TOKENS):
        return None
    most_new = lengths[0] - ids.shape[1]
    if most_new < 1:
        return None
    return Call(ids, config, arguments, cache_name, most_new, *chosen, pad, stop_ids)
