"""Calls in which a model would make a cache of keys and values, and is kept from it.

transformers takes positions that begin anew in a row for several samples that are packed into it, and masks
them from each other, but only in calls without a mask and without a cache. A call that would have had a cache
gets a mask of ones, so that it attends to what it attends to otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

MAKES_CACHE = "use_cache"
_MASK = "attention_mask"


def without_cache(model: nn.Module, names: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that makes no cache, and computes the same.

    Args:
        model: that is called.
        names: of the arguments of its forward method.
        given: the arguments by name; no cache is among them.
    """
    if MAKES_CACHE not in names:
        return dict(given)
    changed = {**given, MAKES_CACHE: False}
    positions, tokens = given.get("position_ids"), given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    is_plain = isinstance(positions, Tensor) and given.get(_MASK) is None and _MASK in names
    # Kernels of flash attention find packed samples by themselves, with a cache or without.
    is_flash = "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", None))
    if is_plain and isinstance(tokens, Tensor) and not is_flash and _makes_cache(model, given):
        changed[_MASK] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return changed


def _makes_cache(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether the call would make a cache: as it says, or else the config, but not where layers recompute."""
    config: Any = getattr(model, "config", None)
    value = given.get(MAKES_CACHE)
    if value is None:
        value = getattr(config, MAKES_CACHE, None)
    if value is None and hasattr(config, "get_text_config"):
        value = getattr(config.get_text_config(decoder=True), MAKES_CACHE, None)
    recomputes = any(m.training and getattr(m, "gradient_checkpointing", False) for m in model.modules())
    return bool(value) and not recomputes
