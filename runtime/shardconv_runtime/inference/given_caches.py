"""Caches that a caller gives to a model of several ranks: a rank keeps keys and values of its own heads.

A cache that was allocated from the config, as transformers' documentation and its prefill in chunks do, has
the heads of the full model. While it is empty it is allocated anew, as the rank fills it. One that another
model has filled is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..errors import PlanError


def localize_caches(model: nn.Module) -> None:
    """Have a model look at the caches that its calls are given, in place.

    Args:
        model: of this rank, complete, compiled if it is to be.
    """
    look = _Look()
    compiled = model._compiled_call_impl
    if compiled is None:
        model.register_forward_pre_hook(look, prepend=True, with_kwargs=True)
        return

    def looked(*args: Any, **kwargs: Any) -> Any:
        look(model, args, kwargs)
        return compiled(*args, **kwargs)

    model._compiled_call_impl = looked


class _Look:
    """Forward pre-hook of a model."""

    def __init__(self) -> None:
        self._seen: WeakSet[Any] = WeakSet()
        """Caches are looked at once: to ask how long one is may wait for the device."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Look:
        """A copy of a model has seen nothing."""
        return _Look()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        for given in (*args, *kwargs.values()):
            for cache in _parts(given):
                if cache not in self._seen:
                    self._seen.add(cache)
                    for layer in cache.layers:
                        _localize(layer)


def _parts(given: Any) -> Iterator[Any]:
    """The caches in an argument; that of an encoder and a decoder consists of two."""
    if isinstance(getattr(given, "layers", None), list) and hasattr(given, "get_seq_length"):
        yield given
    elif hasattr(given, "get_seq_length"):
        for part in vars(given).values():
            yield from _parts(part)


def _localize(layer: Any) -> None:
    """Forget the memory of an empty layer, and have a filled one compare what it is given first."""
    keys = getattr(layer, "keys", None)
    if not getattr(layer, "is_initialized", False) or not isinstance(keys, Tensor) or keys.dim() != 4:
        return
    if int(layer.get_seq_length()):
        layer.update = MethodType(_first_update, layer)
    else:
        layer.keys = layer.values = None
        layer.is_initialized = False


def _first_update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``update`` of a layer with keys ``[B, local heads, S, head dim]``.

    Raises:
        PlanError: the layer has other heads than the rank.
    """
    vars(self).pop("update", None)
    if self.keys.shape[1] != key_states.shape[1]:
        raise PlanError(
            f"past_key_values has {self.keys.shape[1]} heads of keys and values in a layer, and this rank "
            f"has {key_states.shape[1]} of them: another model filled the cache, and each rank needs only "
            "its own heads; give the model the tokens, or a cache that it filled itself"
        )
    return self.update(key_states, value_states, *args, **kwargs)
