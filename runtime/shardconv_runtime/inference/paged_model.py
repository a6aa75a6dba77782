"""A proxy of a loaded model for transformers' continuous batching: local heads, and eager calls.

Its cache has pages, from which each layer reads the keys and values of all requests of a batch. The config,
which describes the full model, determines the size of a page. The plan determines how many heads a rank has;
the number is read from the ordinary cache of a call of one token.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..comm.call_agreement import PAGED
from ..default_modes import in_one_thread
from ..errors import PlanError, RefusedCallError, ShardconvError, UnsupportedError, brief
from ..parallel.boundary import CACHE_ARGUMENTS, forward_signature
from ..parallel.row_ids import is_recorded, require_in_table
from ..pp.stage_link import StageLink
from .masks_by_request import masked_by_request
from .products_in_float32 import in_float32


def length_limit(config: Any) -> int | None:
    """Return the most tokens of a sequence before a rotary embedding changes; None if none ever does."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [each for each in rope.values() if isinstance(each, Mapping)] or [rope]
    limits = []
    for parameters in kinds:
        kind = str(parameters.get("rope_type"))
        if kind == "longrope":
            trained = getattr(text, "original_max_position_embeddings", None)
            trained = parameters.get("original_max_position_embeddings") or trained
            limits.append(trained or text.max_position_embeddings)
        elif "dynamic" in kind:
            limits.append(text.max_position_embeddings)
    return min(limits, default=None)


@dataclass(frozen=True)
class RequestCheck:
    """The limits of a model's requests; made once, since requests are added while others are answered.

    Some rotary embeddings change with the largest position of a call. In a packed call that is the position
    of another request, or of a part of a prompt, so that a request would get other angles than by itself.
    """

    rows: int | None
    """The global number of rows of the input embedding; None if it has none."""
    limit: int | None
    """See ``length_limit``."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return the check of a loaded model."""
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
        return cls(rows, length_limit(model.config))

    def require(self, prompt: Sequence[int], max_new_tokens: int | None) -> None:
        """Check a request."""
        if not len(prompt):
            raise RefusedCallError("a prompt without tokens cannot be continued")
        if self.rows is not None:
            require_in_table(int(min(prompt)), int(max(prompt)), self.rows, "the model")
        num_new = 1 if max_new_tokens is None else max_new_tokens
        # The last new token is not computed with.
        if self.limit is not None and len(prompt) + num_new - 1 > self.limit:
            raise RefusedCallError(
                f"a request for {len(prompt)} tokens and {num_new} new ones exceeds {self.limit} tokens. "
                "Longer texts change the model's rotary embedding for all tokens of a call, also for "
                "other requests; ask for fewer, or use generate"
            )


ENOUGH_TOKENS = 64
"""A prompt of this length has shown it. Until one comes, those twice as long as any before are compared."""

MOST_TOKENS = 1024
"""Longest prompt that is computed once more."""

MOST_CALLS = 32

PREFIX = "paged|"
"""Prefix of transformers' names of attention functions that read pages."""


class PagedCheck:
    """Compares the logits of prompts between packed calls and ordinary calls.

    A packed call gives the model its sequences end to end, with positions and a mask, and another attention
    function. Code that looks at the order of tokens in any other way, or gives that function more than it
    takes (a cap of scores, a bias), would be silently wrong.
    """

    def __init__(self, link: StageLink | None = None) -> None:
        self._link = link
        self._num_tokens = 0
        self._num_times = 1
        """How many times as long as the shortest prompt of a call a sequence was, when that was compared."""
        self._num_calls = 0

    def compare(self, model: Any, inputs: Mapping[str, Any], logits: Tensor) -> None:
        """Compare the longest prompt that begins in a packed call, if it is longer than those before, and the
        shortest one next to longer sequences, for which code may compute something else.

        Args:
            logits: its results, ``[1, T, V]`` for all tokens or only for ``logits_indices``.
        """
        if self._num_calls >= MOST_CALLS or is_recorded(logits):
            return
        self._num_calls += 1
        prompts = [prompt for prompt in _prompts(inputs) if prompt[1] - prompt[0] <= MOST_TOKENS]
        if not prompts:
            return
        shortest, longest = prompts[0], prompts[-1]
        num_tokens = longest[1] - longest[0]
        is_longer = self._num_tokens < ENOUGH_TOKENS and num_tokens > 2 * self._num_tokens
        if is_longer and self._compare(model, inputs, logits, longest):
            self._num_tokens = num_tokens
        num_times = (int(inputs["position_ids"].max()) + 1) // (shortest[1] - shortest[0])
        if num_times >= 2 * self._num_times and self._compare(model, inputs, logits, shortest):
            self._num_times = num_times

    def _compare(
        self, model: Any, inputs: Mapping[str, Any], logits: Tensor, prompt: tuple[int, int]
    ) -> bool:
        """Return whether this could be done: logits that are not numbers show nothing, and fail when read."""
        start, stop = prompt
        row = stop - 1
        if logits.shape[1] != inputs["input_ids"].shape[1]:  # only those that are asked for were computed
            row = inputs["logits_indices"].tolist().index(row)
        got = logits[0, row].float()
        want = _ordinary_logits(model, inputs["input_ids"][:, start:stop])
        error = float((got - want).norm() / want.norm())
        if self._link is not None:
            shared = torch.tensor([error], dtype=torch.float64, device=logits.device)
            self._link.share([shared])
            error = float(shared)
        # In low precision rounding also sends tokens to other experts.
        if error > (1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.1):
            self._num_calls = 0  # a later batch is compared as well
            longest = int(inputs["position_ids"].max()) + 1
            raise UnsupportedError(
                f"{type(model).__name__} does not support continuous batching with the attention "
                f"{model.config._attn_implementation!r}: for a prompt of {stop - start} tokens, next to "
                f"sequences of up to {longest}, its logits from pages differ by {error:.1%} from an ordinary "
                "call; use generate"
            )
        return math.isfinite(error)


def _prompts(inputs: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Start and stop of the prompts that begin here and whose last logits are asked for, shortest first."""
    ends = inputs["cu_seq_lens_q"].tolist()
    positions, asked = inputs["position_ids"][0].tolist(), set(inputs["logits_indices"].tolist())
    prompts = [
        (start, stop)
        for start, stop in pairwise(ends)
        if stop > start and positions[start] == 0 and stop - 1 in asked
    ]
    return sorted(prompts, key=lambda prompt: prompt[1] - prompt[0])


def _ordinary_logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of the last token of ``ids: [1, S]``, float32 ``[V]``."""
    keep = {"logits_to_keep": 1} if "logits_to_keep" in forward_signature(model).parameters else {}
    with ordinary_attention(model):
        logits: Tensor = model._call_impl(input_ids=ids, use_cache=False, **keep).logits
    return logits[0, -1].float()


@contextmanager
def ordinary_attention(model: Any) -> Generator[None]:
    """Let a model compute attention without pages within this context."""
    paged = model.config._attn_implementation
    name = str(paged).removeprefix(PREFIX)
    if name == paged:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(paged)


@dataclass(frozen=True)
class CachedHeads:
    """The values that each layer of a rank's model caches for a token."""

    layers: tuple[int, ...]
    """The layers that are on the rank's stage."""
    number: int
    """Local."""
    width: int
    dtype: torch.dtype


PIECE_BYTES = 128
"""The pieces in which transformers gives out a cache are multiples of this."""


class PagedModel:
    """Replaces a loaded model in transformers' continuous batching.

    Attributes other than those defined here are the model's.
    """

    def __init__(
        self,
        model: Any,
        heads: CachedHeads,
        check: PagedCheck,
        link: StageLink | None = None,
        kinds: Sequence[str] = (),
    ) -> None:
        self.unwrapped = model
        self._heads = heads
        self._link = link
        self._kinds = kinds
        self._is_counted = False
        self._check = check
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
        """Return the dtype of keys and values, which may differ from the dtype of packed weights."""
        return self._heads.dtype

    @property
    def config(self) -> Any:
        """Return a copy of the text model's config with local numbers of heads and this stage's layers."""
        local = copy.copy(self.unwrapped.config.get_text_config(decoder=True))
        local._attn_implementation = self.unwrapped.config._attn_implementation
        local.num_key_value_heads = self._heads.number
        local.head_dim = self._heads.width
        if self._link is not None:
            local.num_hidden_layers = len(self._kinds or self._heads.layers)
            local.layer_types = [*self._kinds] or None
        return local

    def blocks_for(self, lengths: Iterable[int], page_size: int) -> int:
        """Return the number of blocks of a cache that holds sequences of these lengths beside each other.

        A block has a page for each layer. The cache gives out larger pieces, of which the layers of each kind
        of attention may leave a part of one unused.
        """
        kinds = Counter(self._kinds or kinds_of_layers(self.unwrapped, self._heads.layers))
        num_layers = tuple(kinds.values()) or (len(self._heads.layers),)
        page_bytes = 2 * self._heads.number * self._heads.width * self._heads.dtype.itemsize * page_size
        piece_bytes = math.lcm(PIECE_BYTES, *(number * page_bytes for number in num_layers))
        blocks_of_piece = -(-piece_bytes // (sum(num_layers) * page_bytes))
        return sum(-(-length // page_size) for length in lengths) + len(num_layers) * blocks_of_piece

    def number_layers(self, cache: Any) -> None:
        """Have a cache of this stage's layers, which counts them from 0, take the numbers of the model."""
        update = cache.update
        signature = inspect.signature(update)
        layers = self._heads.layers
        numbers: Sequence[int] = range(len(layers))
        if self._kinds:  # the cache has a place for each layer, by its kind of attention
            free: dict[str, list[int]] = {kind: [] for kind in self._kinds}
            for place, kind in enumerate(self._kinds):
                free[kind].append(place)
            numbers = [free[kind].pop(0) for kind in kinds_of_layers(self.unwrapped, layers)]
        places = dict(zip(layers, numbers, strict=True))

        @functools.wraps(update)
        def numbered(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            return update(**{**arguments, "layer_idx": places[arguments["layer_idx"]]})

        cache.update = numbered

    def __call__(self, **inputs: Any) -> Any:
        """Call the model, uncompiled: a graph of ``load(compile=True)`` knows no pages."""
        token = PAGED.set(True)
        try:
            # The last stage sends the chosen tokens, not the logits.
            keeping = nullcontext() if self._link is None else self._link.keeping_results()
            with keeping, in_float32(inputs["input_ids"].numel(), self.dtype, self.unwrapped.device):
                output = self._call(inputs) if self._is_counted else self._counted_call(inputs)
                self._check.compare(self.unwrapped, inputs, output.logits)
                return output
        finally:
            PAGED.reset(token)

    def _call(self, inputs: dict[str, Any]) -> Any:
        return self.unwrapped._call_impl(**masked_by_request(inputs, self.unwrapped.device))

    def _counted_call(self, inputs: dict[str, Any]) -> Any:
        """Return the first call: each layer has to attend through the pages, once."""
        cache, layers = inputs["cache"], []
        update, replaced = cache.update, vars(cache).get("update")
        signature = inspect.signature(update)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            layers.append(signature.bind(*args, **kwargs).arguments["layer_idx"])
            return update(*args, **kwargs)

        cache.update = recorded
        try:
            output = self._call(inputs)
        finally:
            del cache.update
            if replaced is not None:
                cache.update = replaced
        if sorted(layers) != list(self._heads.layers):
            raise UnsupportedError(
                f"{type(self.unwrapped).__name__} does not support continuous batching: of its "
                f"{len(self._heads.layers)} layers, {len(set(layers))} read keys and values from pages; "
                "use generate"
            )
        self._is_counted = True
        return output


def kinds_of_layers(model: Any, layers: Iterable[int]) -> list[str]:
    """Return the kinds of attention of a model's layers; none if all are of one kind."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return [kinds[layer] for layer in layers] if kinds else []


def kinds_of_stages(stages: Sequence[Sequence[str]], own: int) -> list[str]:
    """Return the kinds of layers for which the cache of a stage is made.

    With several kinds, all stages have as many layers of each kind as the stage with most: a page is divided
    between the layers of a kind, and the stages have to agree on how many requests there is room for.
    """
    names = sorted({kind for kinds in stages for kind in kinds})
    if len(names) < 2:
        return list(stages[own])
    return [name for name in names for _ in range(max(Counter(kinds)[name] for kinds in stages))]


@torch.no_grad()
def cached_heads(model: Any, link: StageLink | None = None) -> CachedHeads:
    """Find the values that a rank's model caches, by a call of one token; all ranks call this."""
    name = f"{type(model).__name__} does not support continuous batching"
    if "position_ids" not in forward_signature(model).parameters:
        raise RefusedCallError(f"{name}: its forward pass takes no position_ids; use generate")
    token = PAGED.set(True)
    try:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        # Batches are computed in another thread, for which OpenMP starts as many again. If there are more of
        # them than cores, all sleep between operators instead of waiting: a token took 1.15 times as long.
        with ordinary_attention(model), in_one_thread():
            output = model._call_impl(input_ids=ids, use_cache=True)
            cache: Any = next((output[name] for name in CACHE_ARGUMENTS if name in output), None)
    finally:
        PAGED.reset(token)
    kinds = {type(layer) for layer in cache.layers} if type(cache) is DynamicCache else {type(cache)}
    if unknown := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        kind = min(other.__name__ for other in unknown)
        raise RefusedCallError(f"{name}: its cache has more than keys and values ({kind}); use generate")
    layers = {index: (layer.keys, layer.values) for index, layer in enumerate(cache.layers)}
    if link is not None:  # a placeholder writes one head of one element
        layers = {i: (k, v) for i, (k, v) in layers.items() if k is None or k.shape[1:] != (1, 1, 1)}
    # Check that all layers cache alike; keys and values of each are local ``[1, heads, 1, head_dim]``.
    heads_of_layer = {}
    for index, (keys, values) in layers.items():
        if keys is None or values is None or keys.dim() != 4 or keys.shape != values.shape:
            raise RefusedCallError(
                f"{name}: layer {index} caches no keys and values of one shape; use generate"
            )
        heads_of_layer[index] = CachedHeads(tuple(layers), keys.shape[1], keys.shape[3], keys.dtype)
    if not heads_of_layer:
        raise RefusedCallError(f"{name}: this rank's layers cache nothing; use generate")
    first = min(heads_of_layer)
    for index, heads in heads_of_layer.items():
        if heads != heads_of_layer[first]:
            raise RefusedCallError(
                f"{name}: pages hold the same for every layer, and on this rank layer {first} caches "
                f"{heads_of_layer[first].number} heads of {heads_of_layer[first].width} for a token, layer "
                f"{index} caches {heads.number} of {heads.width}; use generate"
            )
    return heads_of_layer[first]


def attempt(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of ``make``, or its error, on which all ranks agree later."""
    try:
        return make(), None
    except ShardconvError as error:
        return None, error
    except Exception as error:
        failure = PlanError(f"continuous batching cannot start: {brief(error)}")
        failure.__cause__ = error
        return None, failure
