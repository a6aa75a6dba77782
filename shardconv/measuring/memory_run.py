"""One run of a rank's model on meta tensors: what was alive when, and what stayed in the cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from shardconv_runtime.parallel.build import stored_tensors
from torch import Tensor, nn

from ..inputs.tokens import token_parameter
from ..inputs.trace_inputs import TraceInputs
from ..tracing.identities import META
from .live_memory import LiveMemory, OperatorMemo

# Calls of a model on meta tensors: a prompt of any length and batch, and one more token.

DECODER = "decoder_input_ids"
_LAST_LOGITS = "logits_to_keep"
"""For how many tokens the model computes logits; ``generate`` asks for one."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a call."""

    batch: int
    length: int
    """Tokens of the prompt; of the decoder's, where there is an encoder too."""
    source_length: int = 0
    """Tokens that the encoder reads."""


class Calls:
    """Makes the arguments of calls of one model.

    Args:
        model: its forward method is looked at.
        inputs: with which it was traced.
        with_all: give it all kinds of inputs with which it was traced, not tokens alone.
    """

    def __init__(self, model: nn.Module, inputs: TraceInputs, *, with_all: bool) -> None:
        self.parameters = inspect.signature(model.forward).parameters
        self.tokens = token_parameter(model, self.parameters)
        self.has_decoder = DECODER in self.parameters
        self.has_source = self.has_decoder and bool(self.tokens)
        self._traced = inputs.tensors
        self._with_all = with_all or not self.tokens

    def prompt(self, size: Size) -> dict[str, Any]:
        """Arguments of a prefill as ``generate`` makes it, by keyword; tensors on meta."""
        tensors = self._others(size.batch) if self._with_all else {}
        if self.tokens:
            length = size.source_length if self.has_source else size.length
            tensors[self.tokens] = self._ids(self.tokens, size.batch, length)
        if self.has_decoder:
            tensors[DECODER] = self._ids(DECODER, size.batch, size.length)
        return tensors | self._options()

    def next_token(self, size: Size, cache: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the call that continues a cache by one token."""
        name = DECODER if self.has_decoder else self.tokens
        prompt = self.prompt(size)
        kept = prompt if self.has_decoder else self._options()
        return {**kept, name: self._ids(name, size.batch, 1), **cache}

    def handed_back(self, outputs: Any) -> dict[str, Any]:
        """The outputs that are arguments of the next call: a cache, states."""
        if not isinstance(outputs, Mapping):
            return {}
        return {name: value for name, value in outputs.items() if name in self.parameters}

    def _options(self) -> dict[str, Any]:
        cache = {"use_cache": True} if "use_cache" in self.parameters else {}
        return cache | ({_LAST_LOGITS: 1} if _LAST_LOGITS in self.parameters else {})

    def _ids(self, name: str, batch: int, length: int) -> Tensor:
        """Ids ``[B, S]``; several streams of ids may be stacked in the batch."""
        rows = batch * self._per_row(self._traced.get(name))
        return torch.empty(rows, length, dtype=torch.long, device=META)

    def _others(self, batch: int) -> dict[str, Any]:
        """The inputs of the trace that are not made of tokens, with another batch."""
        tokens = self._traced.get(self.tokens or DECODER)
        found: dict[str, Any] = {}
        for name, tensor in self._traced.items():
            is_like_tokens = tokens is not None and tensor.shape[:2] == tokens.shape[:2]
            if name in (self.tokens, DECODER) or is_like_tokens:
                continue
            rows = self._per_row(tensor) * batch
            found[name] = torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device=META)
        return found

    def _per_row(self, tensor: Tensor | None) -> int:
        """Entries of dim 0 for each sequence of the batch of the trace."""
        batch = next(iter(self._traced.values())).shape[0]
        return 1 if tensor is None or tensor.shape[0] % batch else tensor.shape[0] // batch


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """The memory under a tensor of the cache."""

    num_bytes: int
    place: str
    """The layer that made it; empty if none did."""


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """What a call of one size needs."""

    live: tuple[int, ...]
    """Bytes of the live tensors less those of the cache afterwards, whenever a tensor was made.

    They are negative while most of the cache is not there yet.
    """
    cache: Mapping[str, CachedTensor]
    """Path of a tensor in the outputs -> its memory; each memory under one path."""
    logits_token_bytes: int
    num_operators: int
    has_views: bool
    """Whether a tensor of the cache is only a part of its memory."""


class Runner:
    """Runs one rank's model.

    Args:
        model: of one rank, on meta.
        calls: of this model.
        counts: FQN of a layer -> number of layers that it stands for, beside itself.
    """

    def __init__(self, model: nn.Module, calls: Calls, counts: Mapping[str, int]) -> None:
        self.model = model
        self.calls = calls
        self._stack: list[str] = []
        self._memo = OperatorMemo()
        self._known: dict[Size, MemoryRun] = {}
        self._stored = [tensor for _, tensor in stored_tensors(model)]
        self._counts = counts
        for fqn in sorted(counts):
            module = model.get_submodule(fqn)
            module.register_forward_pre_hook(lambda *_, fqn=fqn: self._stack.append(fqn))
            module.register_forward_hook(lambda *_: self._leave())

    def prompt(self, size: Size, max_operators: int) -> MemoryRun:
        """Read a prompt for the logits of its last token; an error is that of the model's code.

        Raises:
            TooLong: if there are more operators.
        """
        if size not in self._known:
            mode = self._mode(max_operators)
            outputs = self._call(mode, self.calls.prompt(size))
            cached = dict(_cached(self.calls.handed_back(outputs), mode))
            self._known[size] = MemoryRun(
                live=self._live(mode, cached),
                cache=_by_path(cached, mode),
                logits_token_bytes=_logits_token_bytes(outputs),
                num_operators=max_operators - mode.operators_left,
                has_views=any(
                    tensor.nbytes < tensor.untyped_storage().nbytes()
                    for _, tensor in tensors_of(self.calls.handed_back(outputs))
                ),
            )
        return self._known[size]

    def continued(self, size: Size, max_operators: int) -> Mapping[str, CachedTensor]:
        """The cache of ``size``, of which the last token was read alone, as in decoding.

        Where tensors are views after a prompt, they are others then.
        """
        whole = self.prompt(size, max_operators)
        if not whole.has_views:
            return whole.cache
        mode = self._mode(2 * max_operators)
        prompt = Size(size.batch, size.length - 1, size.source_length)
        cache = self.calls.handed_back(self._call(mode, self.calls.prompt(prompt)))
        if cache:
            cache = self.calls.handed_back(self._call(mode, self.calls.next_token(prompt, cache)))
        return _by_path(dict(_cached(cache, mode)), mode)

    def _mode(self, max_operators: int) -> LiveMemory:
        return LiveMemory(max_operators, self._place, self._stored, self._memo)

    def _call(self, mode: LiveMemory, arguments: Mapping[str, Any]) -> Any:
        self._stack.clear()
        for value in arguments.values():
            if isinstance(value, Tensor):
                mode.values.fill(value, 1)
        with torch.inference_mode(), mode:
            return self.model(**arguments)

    def kept_bytes(self, cache: Mapping[str, CachedTensor]) -> int:
        """Return the bytes of the cache of all layers."""
        return sum(held.num_bytes * self.count(held.place) for held in cache.values())

    def count(self, place: str) -> int:
        """The number of layers for which one counts."""
        return 1 + self._counts.get(place, 0)

    def _live(self, mode: LiveMemory, cached: Mapping[int, str]) -> tuple[int, ...]:
        """A tensor of the cache of a layer that stands for others comes with those of all of them."""
        kept = {index: mode.sizes[index] * self.count(mode.places[index]) for index in cached}
        live, found = -sum(kept.values()), []
        for index, is_made in mode.lives:
            num_bytes = kept.get(index, mode.sizes[index])
            live += num_bytes if is_made else -num_bytes
            if is_made:
                found.append(live)
        return tuple(found)

    def _place(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _leave(self) -> None:
        self._stack.pop()


def _logits_token_bytes(outputs: Any) -> int:
    """Of one token's logits, in ``[B, S, V]``; 0 where the model gives none."""
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        return 0
    return logits.shape[2] * logits.element_size()


def _by_path(cached: Mapping[int, str], mode: LiveMemory) -> dict[str, CachedTensor]:
    return {path: CachedTensor(mode.sizes[i], mode.places[i]) for i, path in cached.items()}


def _cached(cache: Mapping[str, Any], mode: LiveMemory) -> Iterator[tuple[int, str]]:
    """(number of a storage, path) of each memory under the tensors in a cache, once each."""
    seen: set[int] = set()
    for path, tensor in tensors_of(cache):
        index = mode.index(tensor)
        if index is not None and index not in seen:
            seen.add(index)
            yield index, path


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of all tensors in a value, in containers and in the attributes of objects."""
    todo: list[tuple[str, Any]] = [("", value)]
    seen: list[Any] = []
    known: set[int] = set()
    while todo:
        path, current = todo.pop(0)
        if isinstance(current, Tensor):
            yield path, current
            continue
        if id(current) in known:
            continue
        known.add(id(current))
        seen.append(current)  # alive as long as its id is known
        todo += [(f"{path}.{name}" if path else str(name), item) for name, item in _items(current)]


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """What is in a container or an object; not in modules, classes and functions."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif not isinstance(value, (nn.Module, type)) and hasattr(value, "__dict__") and not callable(value):
        yield from vars(value).items()
