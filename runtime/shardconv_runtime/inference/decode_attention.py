"""Attention of a decoding step, in which each row has one query and the cache is read once.

In a compiled call with a mask, such as a decoding step, transformers repeats keys and values for all heads
of a group before it calls ``scaled_dot_product_attention``. The repeated cache is written to memory and
read again: with 4 query heads for each key head, a step moves nine times the bytes of its cache. Here the
heads of a group are the rows of one matrix, which is multiplied with the cache as it lies in memory.

The form is two products and a softmax. Kernels for prefills give the keys of one head to one
multiprocessor, which takes long over a long text; products share them among all multiprocessors. gpt-fast
decodes in this form for the same reason (https://github.com/pytorch-labs/gpt-fast).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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
        output: tuple[Tensor, Tensor | None] = ordinary(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
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
