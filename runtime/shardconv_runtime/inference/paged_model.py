"""What transformers' continuous batching sees of a loaded model: its local heads, and eager calls.

Its cache has pages, from which each layer reads the keys and values of all requests of a batch. The pages are
sized by the config, which describes the full model; how many heads a rank has follows from the plan, and is
read from the ordinary cache of a call of one token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.same_calls import PAGED
from ..errors import PlanError, ShardconvError, brief
from ..parallel.boundary import forward_signature
from .paged_check import PagedCheck, ordinary_attention


@dataclass(frozen=True)
class CachedHeads:
    """What each layer of a rank's model caches for a token."""

    num_layers: int
    number: int
    """Local."""
    width: int
    dtype: torch.dtype


class PagedModel:
    """Stands for a loaded model in transformers' continuous batching.

    Args:
        model: of this rank.
        heads: that the model caches.

    Attributes other than those defined here are the model's.
    """

    def __init__(self, model: Any, heads: CachedHeads) -> None:
        self.unwrapped = model
        self._heads = heads
        self._is_counted = False
        self._check = PagedCheck()
        # None of transformers' own tensor parallelism: the cache takes the number of heads as it is.
        self._device_mesh = None
        self.tp_plan: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwrapped, name)

    def eval(self) -> PagedModel:
        """Put the model in eval mode."""
        self.unwrapped.eval()
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values, which may differ from that of packed weights."""
        return self._heads.dtype

    @property
    def config(self) -> Any:
        """A copy of the text model's config, with local numbers of heads."""
        local = copy.copy(self.unwrapped.config.get_text_config(decoder=True))
        local._attn_implementation = self.unwrapped.config._attn_implementation
        local.num_key_value_heads = self._heads.number
        local.head_dim = self._heads.width
        return local

    def __call__(self, **inputs: Any) -> Any:
        """Call the model, uncompiled: a graph of ``load(compile=True)`` knows no pages."""
        token = PAGED.set(True)
        try:
            output = self._call(inputs) if self._is_counted else self._counted_call(inputs)
            self._check.compare(self.unwrapped, inputs, output.logits)
            return output
        finally:
            PAGED.reset(token)

    def _call(self, inputs: dict[str, Any]) -> Any:
        return self.unwrapped._call_impl(**inputs)

    def _counted_call(self, inputs: dict[str, Any]) -> Any:
        """The first call: each layer has to attend through the pages, once."""
        cache, layers = inputs["cache"], []
        update = cache.update
        signature = inspect.signature(update)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            layers.append(signature.bind(*args, **kwargs).arguments["layer_idx"])
            return update(*args, **kwargs)

        cache.update = recorded
        try:
            output = self._call(inputs)
        finally:
            del cache.update
        if sorted(layers) != list(range(self._heads.num_layers)):
            raise PlanError(
                f"{type(self.unwrapped).__name__} does not support continuous batching: of its "
                f"{self._heads.num_layers} layers, {len(set(layers))} read keys and values from pages; "
                "use generate"
            )
        self._is_counted = True
        return output


@torch.no_grad()
def cached_heads(model: Any) -> CachedHeads:
    """What a rank's model caches, from a call of one token; all ranks call this.

    Raises:
        PlanError: the model cannot decode from pages of keys and values.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    name = f"{type(model).__name__} does not support continuous batching"
    if "position_ids" not in forward_signature(model).parameters:
        raise PlanError(f"{name}: its forward pass takes no position_ids; use generate")
    token = PAGED.set(True)
    try:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        with ordinary_attention(model):
            cache = model._call_impl(input_ids=ids, use_cache=True).get("past_key_values")
    finally:
        PAGED.reset(token)
    kinds = {type(layer) for layer in cache.layers} if type(cache) is DynamicCache else {type(cache)}
    if others := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        kind = min(other.__name__ for other in others)
        raise PlanError(f"{name}: its cache has more than keys and values ({kind}); use generate")
    return _same_of_all_layers([(layer.keys, layer.values) for layer in cache.layers], name)


def _same_of_all_layers(layers: list[tuple[Tensor | None, Tensor | None]], name: str) -> CachedHeads:
    """Keys and values of each layer, local ``[1, heads, 1, head_dim]``."""
    found = []
    for index, (keys, values) in enumerate(layers):
        if keys is None or values is None or keys.dim() != 4 or keys.shape != values.shape:
            raise PlanError(f"{name}: layer {index} caches no keys and values of one shape; use generate")
        found.append(CachedHeads(len(layers), keys.shape[1], keys.shape[3], keys.dtype))
    for index, heads in enumerate(found):
        if heads != found[0]:
            raise PlanError(
                f"{name}: pages hold the same for every layer, and on this rank layer 0 caches "
                f"{found[0].number} heads of {found[0].width} for a token, layer {index} caches "
                f"{heads.number} of {heads.width}; use generate"
            )
    if not found:
        raise PlanError(f"{name}: it caches nothing; use generate")
    return found[0]


def attempt(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What ``make`` returns, or an error of ours, for all ranks to agree on."""
    try:
        return make(), None
    except ShardconvError as error:
        return None, error
    except Exception as error:
        failure = PlanError(f"continuous batching cannot start: {brief(error)}")
        failure.__cause__ = error
        return None, failure
