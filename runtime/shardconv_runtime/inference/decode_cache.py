"""The cache of decoding steps: buffers that stay where they are, filled from the cache of a prefill.

A prefill runs with transformers' own growing cache. Its contents are copied into these buffers, and each
step adds one token. Shapes and addresses depend on the bucket, not on the prompt.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

# Memory that decoding steps keep from call to call, and share between their buckets.


class Buffers:
    """Named flat memory, of which each bucket takes a view: it is as large as the largest bucket needs.

    Attributes:
        device: where it is.
        generation: counts how often memory moved, which makes recorded addresses invalid.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}
        self.generation = 0

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor; of undefined content, since other buckets write there."""
        key = (name, dtype)
        count = math.prod(shape)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < count:
            self.generation += flat is not None
            with torch.inference_mode(False):  # calls in inference mode and others write to it
                self._flat[key] = flat = torch.zeros(max(count, 1), dtype=dtype, device=self.device)
        return flat[:count].view(shape)

    @property
    def num_bytes(self) -> int:
        """Return all memory held."""
        return sum(flat.nbytes for flat in self._flat.values())


def repeat_first(buffer: Tensor, num_rows: int) -> None:
    """Let the rows of ``[B, ...]`` that no call asked for, after ``num_rows``, repeat the first."""
    if num_rows < len(buffer):
        buffer[num_rows:] = buffer[:1]


_EMPTY: type = getattr(cache_utils, "DummyLayer", type(None))
"""The class of layers that keep nothing; older versions of transformers lack it."""

_ATTENTION = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
_STATES = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class OneTokenLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of one layer, to which a call adds one token.

    Args:
        keys, values: buffers ``[B, local heads, slots, head dim]``.
    """

    is_compileable = True
    supports_early_init = False

    def __init__(
        self, keys: Tensor, values: Tensor, reach: int, length: Tensor, *, is_sliding: bool, is_ring: bool
    ) -> None:
        CacheLayerMixin.__init__(self)
        self.buffers = keys, values
        self.keys, self.values = keys[..., :reach, :], values[..., :reach, :]
        self.length = length
        self.is_sliding = is_sliding
        self.is_ring = is_ring
        self.slots = self.keys.shape[-2]
        self.num_added = 0
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device
        self.batch_size = keys.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add ``[B, local heads, 1, head dim]``; returns the buffers."""
        slot = self.length.reshape(1)
        if self.is_ring:
            slot = slot % self.slots
        self.keys.index_copy_(-2, slot, key_states)
        self.values.index_copy_(-2, slot, value_states)
        self.num_added = 1
        return self.keys, self.values

    def get_seq_length(self) -> Tensor:  # type: ignore[override]  # as in transformers' static layers
        """Return the number of tokens, int64 ``[]``."""
        return self.length + self.num_added

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the slots, and the position of the first."""
        return self.slots, 0

    def get_max_length(self) -> int:
        """Return the number of slots."""
        return self.slots

    def reaching(self, reach: int) -> OneTokenLayer:
        """Return the same layer, of which calls read more slots."""
        wide = copy.copy(self)
        if not self.is_ring:
            wide.keys, wide.values = (buffer[..., :reach, :] for buffer in self.buffers)
            wide.slots = wide.keys.shape[-2]
        return wide

    def written(self, num_calls: int) -> Iterator[Tensor]:
        """Yield the parts of buffers that this many calls write, from an empty cache on."""
        for buffer in (self.keys, self.values):
            yield buffer[..., :num_calls, :]

    def fill(self, layer: Any) -> None:
        """Copy the cache of a prefill's layer (each ``[rows, local heads, n, head dim]``)."""
        stop = int(layer.get_seq_length())
        for buffer, tensor in zip(self.buffers, (layer.keys, layer.values), strict=True):
            buffer.zero_()  # masked values must be finite
            positions = torch.arange(stop - tensor.shape[-2], stop, device=buffer.device)
            slots = positions % self.slots if self.is_ring else positions  # in all buffers, or in the ring
            buffer[: len(tensor)].index_copy_(-2, slots, tensor)
            repeat_first(buffer, len(tensor))


class _States(LinearAttentionLayer):  # type: ignore[misc]
    """Convolution and recurrent states of one layer, as transformers has them, in buffers that stay."""

    def adopt(self, layer: Any, buffers: Buffers, batch: int, prefix: str) -> None:
        """Give the states places of ``batch`` rows, and flags as they are after a prefill."""
        for name, value in vars(layer).items():
            if name in ("keys", "values"):
                continue
            if isinstance(value, dict):
                value = {k: _place(v, buffers, batch, f"{prefix}.{name}.{k}") for k, v in value.items()}
            self.__dict__[name] = _place(value, buffers, batch, f"{prefix}.{name}")

    def reaching(self, reach: int) -> Self:
        """Return the same states: they do not grow with the text."""
        return copy.copy(self)

    def written(self, num_calls: int) -> Iterator[Tensor]:
        """Yield the parts of buffers that any call writes."""
        for name, value in vars(self).items():
            if name not in ("keys", "values", "buffers"):
                yield from (tensor for tensor, _ in _pairs(value, value))

    def fill_states(self, layer: Any) -> None:
        """Copy the states that a prefill left in its layer (each ``[rows, ...]``)."""
        for name, value in vars(layer).items():
            if name in ("keys", "values"):
                continue
            for mine, state in _pairs(vars(self)[name], value):
                mine[: len(state)] = state
                repeat_first(mine, len(state))


class LinearStates(_States):
    """The cache of a layer without attention."""

    def fill(self, layer: Any) -> None:
        """Copy the state of a prefill."""
        self.fill_states(layer)


class HybridLayer(OneTokenLayer, _States):
    """The cache of a layer that has both attention and states."""

    def reaching(self, reach: int) -> Self:
        """See ``OneTokenLayer``."""
        return OneTokenLayer.reaching(self, reach)  # type: ignore[return-value]

    def written(self, num_calls: int) -> Iterator[Tensor]:
        """See ``OneTokenLayer``."""
        yield from OneTokenLayer.written(self, num_calls)
        yield from _States.written(self, num_calls)

    def fill(self, layer: Any) -> None:
        """Copy the state of a prefill."""
        OneTokenLayer.fill(self, layer)
        self.fill_states(layer)


class OneTokenCache(Cache):  # type: ignore[misc]
    """A cache to which each call adds one token; ``length`` advances between the calls."""

    def __init__(self, layers: list[Any], length: Tensor) -> None:
        super().__init__(layers=layers)
        self.length = length

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return where the token is among the slots of a layer: of a ring, no further than its last slot.

        A mask of positions then lets it see all slots once the ring is full, as it should.
        """
        offset = self.get_seq_length(layer_idx)
        layer = self.layers[layer_idx]
        return offset.clamp(max=layer.slots - 1) if getattr(layer, "is_ring", False) else offset

    def reaching(self, reach: int) -> OneTokenCache:
        """Return the same cache, of which calls read more slots."""
        layers = [layer if isinstance(layer, _EMPTY) else layer.reaching(reach) for layer in self.layers]
        return OneTokenCache(layers, self.length)

    def written(self, num_calls: int) -> Iterator[Tensor]:
        """Yield the parts of buffers that this many calls write, from an empty cache on."""
        for layer in self.layers:
            if not isinstance(layer, _EMPTY):
                yield from layer.written(num_calls)

    def begin_call(self) -> None:
        """Note that no layer has added the next token yet."""
        for layer in self.layers:
            if isinstance(layer, OneTokenLayer):
                layer.num_added = 0

    def fill(self, prefilled: Cache) -> None:
        """Copy the cache of a prefill."""
        self.length.fill_(num_tokens(prefilled))
        for mine, layer in zip(self.layers, prefilled.layers, strict=True):
            if not isinstance(mine, _EMPTY):
                mine.fill(layer)


def is_known(cache: Any) -> bool:
    """Return whether all layers of a prefill's cache are of kinds that can be taken over, and are filled."""
    if not isinstance(cache, Cache) or not cache.layers or getattr(cache, "offloading", False):
        return False
    return all(
        type(layer) is _EMPTY
        or (type(layer) in _STATES and _has_states(layer))
        or (type(layer) in _ATTENTION and bool(layer.is_initialized))
        for layer in cache.layers
    )


def num_tokens(cache: Cache) -> int:
    """Return tokens in a prefill's cache; 0 if it only has states, which do not count them."""
    counts = [int(layer.get_seq_length()) for layer in cache.layers if type(layer) in _ATTENTION]
    return max(counts, default=0)


def windows(cache: Cache) -> list[int]:
    """Return the windows of those layers that have one."""
    return [layer.sliding_window for layer in cache.layers if hasattr(layer, "sliding_window")]


def make_cache(
    prefilled: Cache, buffers: Buffers, batch: int, slots: int, reach: int, *, rings: bool
) -> OneTokenCache:
    """Return a cache for steps of a bucket, not filled."""
    length = buffers.get("length", (), torch.int64)
    layers = []
    for index, layer in enumerate(prefilled.layers):
        if type(layer) is _EMPTY:
            layers.append(_EMPTY())
            continue
        made: Any = LinearStates.__new__(LinearStates)
        if type(layer) in _ATTENTION:
            window = getattr(layer, "sliding_window", None)
            is_ring = rings and window is not None and window < slots
            num_slots: int = layer.sliding_window if is_ring else slots
            keys, values = (
                buffers.get(
                    f"{index}.{name}", (batch, *tensor.shape[1:-2], num_slots, tensor.shape[-1]), tensor.dtype
                )
                for name, tensor in (("keys", layer.keys), ("values", layer.values))
            )
            kind = HybridLayer if type(layer) in _STATES else OneTokenLayer
            made = kind.__new__(kind)
        if type(layer) in _STATES:
            made.adopt(layer, buffers, batch, str(index))
        if type(layer) in _ATTENTION:
            OneTokenLayer.__init__(
                made,
                keys,
                values,
                num_slots if is_ring else reach,
                length,
                is_sliding=window is not None,
                is_ring=is_ring,
            )
        layers.append(made)
    return OneTokenCache(layers, length)


def _has_states(layer: Any) -> bool:
    return any(_pairs(value, value) for value in vars(layer).values())


def _place(value: Any, buffers: Buffers, batch: int, name: str) -> Any:
    if isinstance(value, Tensor) and value.dim():
        return buffers.get(name, (batch, *value.shape[1:]), value.dtype)
    return value


def _pairs(mine: Any, found: Any) -> list[tuple[Tensor, Tensor]]:
    """Return buffers and the tensors to copy there, of an attribute that is a tensor or a dict of tensors."""
    if isinstance(found, dict):
        return [pair for key in found for pair in _pairs(mine[key], found[key])]
    return [(mine, found)] if isinstance(found, Tensor) and found.dim() else []
