"""A call of ``generate`` as transformers has prepared it, if one graph can decode it step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .decode_state import MOST_STOP_TOKENS
from .sampling import SamplingMode, choice_of

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
"""Of this attention function, in the registries of transformers."""

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
        module: the attention layer.
        query: local ``[B, H, 1, D]``; its head ``h`` attends to key head ``h * G // H``.
        key: local ``[B, G, L, D]``.
        value: local ``[B, G, L, E]``.
        attention_mask: ``[B or 1, H or 1, 1, L]``; bool (whether a query sees a key), or added to the scores.
        dropout: 0 in inference.
        scaling: of the scores; 1 / sqrt(D) by default.

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
    """In this context calls of a model attend with ``decode_attention`` where they would with sdpa."""
    configs = {id(c): c for c in _configs(model) if c._attn_implementation == ORDINARY}
    for config in configs.values():
        _set(config, NAME)
    try:
        yield
    finally:
        for config in configs.values():
            _set(config, ORDINARY)


def _configs(model: nn.Module) -> Iterator[Any]:
    """The configs that modules look at for the name of their attention function."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            yield config


def _set(config: Any, name: str) -> None:
    # Private: the setter of the public name would also set the configs of other parts of the model.
    config._attn_implementation_internal = name


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[ORDINARY])


CACHE_NAMES = ("past_key_values", "cache_params")
OTHER_WAYS = (
    "custom_generate",
    "assistant_model",
    "assistant_tokenizer",
    "tokenizer",
    "synced_gpus",
    "past_key_values",
    "cache_params",
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
"""Arguments of ``generate`` that are no options of its config."""


def options_of(model: Any, arguments: dict[str, Any]) -> Any:
    """The generation config of a call of ``model.generate``."""
    given = {name: value for name, value in arguments.items() if name not in NOT_OPTIONS}
    # Private, but nothing public tells how the arguments and two configs go together.
    options, _ = model._prepare_generation_config(arguments.get("generation_config"), **given)
    return options


def may_take(model: Any, arguments: dict[str, Any], options: Any) -> bool:
    """Whether a call of ``model.generate`` may be decoded here; the rest is known once it is prepared."""
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
        ids: the prompt, int64 ``[rows, n]``; n is 0 where embeddings are given in its place.
        config: of the generation.
        arguments: of the model.
        cache_name: which of them is the cache; it is empty.
        most_new: tokens to add at most.
        choice: how they are chosen.
        numbers: of the logits processors.
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
    """A call as ``generate`` hands it to a decoding method; None if it is decoded in another way."""
    cache_name = next((name for name in CACHE_NAMES if arguments.get(name) is not None), None)
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
