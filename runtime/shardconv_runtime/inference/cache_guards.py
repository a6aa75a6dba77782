"""Caches that a caller gives to the model: a rank keeps the keys and values of its heads there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import cache_utils

from ..errors import PlanError

_QUANTIZED = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)
"""The layers of quantized caches; since transformers 5.23 they have another base."""


class LocalCaches:
    """Forward pre-hook of a model that looks at the caches among the arguments.

    A cache that was allocated from the config, as in transformers' documentation and in its prefill in
    chunks, has the heads of the full model. While it is empty, it is allocated again when the rank fills it.
    A cache that another model has filled is refused.
    """

    def __init__(self, *, has_all_heads: bool) -> None:
        self._has_all_heads = has_all_heads
        self._seen: WeakSet[Any] = WeakSet()
        """Caches are looked at once: to ask how long one is may wait for the device."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalCaches:
        """Return a hook that has seen nothing."""
        return LocalCaches(has_all_heads=self._has_all_heads)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        for argument in (*args, *kwargs.values()):
            for cache in _parts(argument):
                if cache not in self._seen:
                    self._seen.add(cache)
                    for layer in cache.layers:
                        if isinstance(layer, _QUANTIZED) and not self._has_all_heads:
                            layer.update = MethodType(_first_quantized, layer)
                        keys = getattr(layer, "keys", None)
                        has_keys = isinstance(keys, Tensor) and keys.dim() == 4
                        if not has_keys or not getattr(layer, "is_initialized", False):
                            continue
                        if int(layer.get_seq_length()):
                            layer.update = MethodType(_first_update, layer)
                        else:  # empty, so its memory can be allocated again
                            layer.keys = layer.values = None
                            layer.is_initialized = False


def _first_quantized(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return ``update`` of a quantized layer with keys ``[B, local heads, S, head dim]``."""
    vars(self).pop("update", None)
    if not self.get_seq_length():
        require_scales_within_heads(self, key_states.shape[-1])
    return self.update(key_states, value_states, *args, **kwargs)


def require_scales_within_heads(layer: Any, width: int) -> None:
    """Check that an empty layer of a cache quantizes each head as it would if the others were not there."""
    # Two heads ``[1, 2, S, head dim]`` of unlike sizes, in a prompt of 3 tokens and 2 more.
    sizes = torch.tensor([1.0, 7.3])[:, None, None]
    states = torch.linspace(-1, 1, 10 * width).reshape(1, 2, 5, width) * sizes

    def kept(given: Tensor) -> Tensor:
        layer_copy = copy.deepcopy(layer)
        for tokens in torch.split(given, [3, 2], 2):
            keys, values = layer_copy.update(tokens, tokens)
        return torch.stack((keys, values))

    try:
        both = kept(states)
    except Exception:  # it does not work on one process either, and will say so
        return
    try:
        apart = torch.cat([kept(states[:, [0]]), kept(states[:, [1]])], 2)
    except Exception:
        apart = None
    if apart is None or not torch.equal(both, apart):
        raise PlanError(
            f"the quantized cache ({type(layer).__name__}) quantizes several heads of keys and values "
            "together, and each rank has some of them: its scales would be others than those of the full "
            "model; use a cache that is not quantized, or a backend with groups within a head (quanto or hqq "
            f"with a q_group_size that divides {width})"
        )


def _parts(given: Any) -> Iterator[Any]:
    """Yield the caches in an argument; the cache of an encoder and a decoder consists of two."""
    if isinstance(getattr(given, "layers", None), list) and hasattr(given, "get_seq_length"):
        yield given
    elif hasattr(given, "get_seq_length"):
        for part in vars(given).values():
            yield from _parts(part)


def _first_update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return ``update`` of a layer with keys ``[B, local heads, S, head dim]``."""
    vars(self).pop("update", None)
    if self.keys.shape[1] != key_states.shape[1]:
        raise PlanError(
            f"past_key_values has {self.keys.shape[1]} heads of keys and values in a layer, and this rank "
            f"has {key_states.shape[1]} of them: another model filled the cache, and each rank needs only "
            "its own heads; give the model the tokens, or a cache that it filled itself"
        )
    return self.update(key_states, value_states, *args, **kwargs)
