"""Run a rank's model on meta tensors, to find which tensors are alive when, and which the cache keeps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from shardconv_runtime.parallel.build import stored_tensors
from torch import Tensor, nn

from ..inputs.tokens import token_parameter
from ..inputs.trace_inputs import TraceInputs
from ..tracing.identities import META
from .live_memory import LiveMemory, OperatorMemo

DECODER = "decoder_input_ids"
_LAST_LOGITS = "logits_to_keep"
"""Number of tokens for which the model computes logits; ``generate`` asks for one."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a call."""

    batch: int
    length: int
    """Tokens of the prompt, or of the decoder's prompt if there is an encoder."""
    source_length: int = 0
    """Tokens that the encoder reads."""


class Calls:
    """Make the arguments of calls of one model on meta: a prompt of any size, and one more token.

    Args:
        model: the model, for the signature of its forward.
        inputs: inputs of its trace.
        with_all: pass all kinds of inputs of the trace instead of only tokens.
    """

    def __init__(self, model: nn.Module, inputs: TraceInputs, *, with_all: bool) -> None:
        self.parameters = inspect.signature(model.forward).parameters
        self.tokens = token_parameter(model, self.parameters)
        self.has_decoder = DECODER in self.parameters
        self.has_source = self.has_decoder and bool(self.tokens)
        self._traced = inputs.tensors
        self._with_all = with_all or not self.tokens

    def prompt(self, size: Size) -> dict[str, Any]:
        """Return the keyword arguments of a prefill by ``generate``, on meta."""
        tensors: dict[str, Any] = {}
        if self._with_all:  # inputs of the trace that are not made of tokens, with another batch
            tokens = self._traced.get(self.tokens or DECODER)
            for name, tensor in self._traced.items():
                is_like_tokens = tokens is not None and tensor.shape[:2] == tokens.shape[:2]
                if name not in (self.tokens, DECODER) and not is_like_tokens:
                    rows = self._per_row(tensor) * size.batch
                    tensors[name] = torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device=META)
        if self.tokens:
            length = size.source_length if self.has_source else size.length
            tensors[self.tokens] = self._ids(self.tokens, size.batch, length)
        if self.has_decoder:
            tensors[DECODER] = self._ids(DECODER, size.batch, size.length)
        return tensors | self._options()

    def next_token(self, size: Size, cache: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the call that continues a cache by one token."""
        name = DECODER if self.has_decoder else self.tokens
        prompt = self.prompt(size)
        arguments = prompt if self.has_decoder else self._options()
        return {**arguments, name: self._ids(name, size.batch, 1), **cache}

    def whole(self, size: Size) -> dict[str, Any]:
        """Return the arguments of a forward pass for the logits of all tokens, without a cache, on meta."""
        arguments = self.prompt(size)
        arguments.pop(_LAST_LOGITS, None)
        return arguments | ({"use_cache": False} if "use_cache" in arguments else {})

    def handed_back(self, outputs: Any) -> dict[str, Any]:
        """Return the outputs that are arguments of the next call, such as a cache."""
        if not isinstance(outputs, Mapping):
            return {}
        return {name: value for name, value in outputs.items() if name in self.parameters}

    def _options(self) -> dict[str, Any]:
        cache = {"use_cache": True} if "use_cache" in self.parameters else {}
        return cache | ({_LAST_LOGITS: 1} if _LAST_LOGITS in self.parameters else {})

    def _ids(self, name: str, batch: int, length: int) -> Tensor:
        """Return ids ``[B, S]``; several streams of ids may be stacked in the batch."""
        rows = batch * self._per_row(self._traced.get(name))
        return torch.empty(rows, length, dtype=torch.long, device=META)

    def _per_row(self, tensor: Tensor | None) -> int:
        """Return the entries of dim 0 for each sequence of the batch of the trace."""
        batch = next(iter(self._traced.values())).shape[0]
        return 1 if tensor is None or tensor.shape[0] % batch else tensor.shape[0] // batch


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """The memory under a tensor of the cache."""

    num_bytes: int
    place: str
    """The layer that made it; empty if it was made outside of layers."""


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """The memory of a call of one size."""

    live: tuple[int, ...]
    """Bytes of the live tensors minus the cache after the call, whenever a tensor was made.

    They are negative while most of the cache does not exist yet.
    """
    cache: Mapping[str, CachedTensor]
    """Path of a tensor in the outputs -> its memory; shared memory has only one path."""
    logits_token_bytes: int
    num_operators: int
    has_views: bool
    """Whether a tensor of the cache is a view of a larger one."""


class Runner:
    """Run the model of one rank.

    Args:
        model: the model of one rank, on meta.
        calls: the calls of this model.
        counts: FQN of a layer -> number of other layers that it represents.
    """

    def __init__(self, model: nn.Module, calls: Calls, counts: Mapping[str, int]) -> None:
        self.model = model
        self.calls = calls
        self._stack: list[str] = []
        self.memo = OperatorMemo()
        self._known: dict[Size, MemoryRun] = {}
        self.stored = [tensor for _, tensor in stored_tensors(model)]
        self._counts = counts
        for fqn in sorted(counts):
            module = model.get_submodule(fqn)
            module.register_forward_pre_hook(lambda *_, fqn=fqn: self._stack.append(fqn))
            module.register_forward_hook(self._leave)

    def prompt(self, size: Size, max_operators: int) -> MemoryRun:
        """Read a prompt for the logits of its last token. Errors of the model's code are passed on.

        Raises:
            TooLong: if there are more operators.
        """
        if size not in self._known:
            mode = self._mode(max_operators)
            outputs = self.call(mode, self.calls.prompt(size))
            cached = dict(_cached(self.calls.handed_back(outputs), mode))
            # The cache of a layer that represents others comes with the caches of all of them.
            kept_sizes = {index: mode.sizes[index] * self.count(mode.places[index]) for index in cached}
            now, live = -sum(kept_sizes.values()), []
            for index, is_made in mode.lives:
                num_bytes = kept_sizes.get(index, mode.sizes[index])
                now += num_bytes if is_made else -num_bytes
                if is_made:
                    live.append(now)
            logits = getattr(outputs, "logits", None)
            if not isinstance(logits, Tensor) or logits.dim() != 3:  # [B, S, V]
                logits = None
            self._known[size] = MemoryRun(
                live=tuple(live),
                cache=_by_path(cached, mode),
                logits_token_bytes=0 if logits is None else logits.shape[2] * logits.element_size(),
                num_operators=max_operators - mode.operators_left,
                has_views=any(
                    tensor.nbytes < tensor.untyped_storage().nbytes()
                    for _, tensor in tensors_of(self.calls.handed_back(outputs))
                ),
            )
        return self._known[size]

    def continued(self, size: Size, max_operators: int) -> Mapping[str, CachedTensor]:
        """Return the cache of ``size`` if the last token is read separately, as in decoding.

        Tensors that are views after a prompt are replaced then.
        """
        whole = self.prompt(size, max_operators)
        if not whole.has_views:
            return whole.cache
        mode = self._mode(2 * max_operators)
        prompt = Size(size.batch, size.length - 1, size.source_length)
        cache = self.calls.handed_back(self.call(mode, self.calls.prompt(prompt)))
        if cache:
            cache = self.calls.handed_back(self.call(mode, self.calls.next_token(prompt, cache)))
        return _by_path(dict(_cached(cache, mode)), mode)

    def _mode(self, max_operators: int) -> LiveMemory:
        return LiveMemory(max_operators, self.place, self.stored, self.memo)

    def place(self) -> str:
        """Return the layer that runs and represents others; empty outside of such layers."""
        return self._stack[-1] if self._stack else ""

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    def call(self, mode: LiveMemory, arguments: Mapping[str, Any]) -> Any:
        """Run the model under a mode."""
        self._stack.clear()
        for value in arguments.values():
            if isinstance(value, Tensor):
                mode.values.fill(value, 1)
        with torch.inference_mode(), mode:
            return self.model(**arguments)

    def kept_bytes(self, cache: Mapping[str, CachedTensor]) -> int:
        """Return the bytes of the cache of all layers."""
        return sum(tensor.num_bytes * self.count(tensor.place) for tensor in cache.values())

    def count(self, place: str) -> int:
        """Return the number of layers for which one counts."""
        return 1 + self._counts.get(place, 0)


def _by_path(cached: Mapping[int, str], mode: LiveMemory) -> dict[str, CachedTensor]:
    return {path: CachedTensor(mode.sizes[i], mode.places[i]) for i, path in cached.items()}


def _cached(cache: Mapping[str, Any], mode: LiveMemory) -> Iterator[tuple[int, str]]:
    """Yield (number of a storage, path) once for each memory under the tensors in a cache."""
    seen: set[int] = set()
    for path, tensor in tensors_of(cache):
        index = mode.index(tensor)
        if index is not None and index not in seen:
            seen.add(index)
            yield index, path


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of all tensors in a value, in containers and in attributes of objects."""
    todo: list[tuple[str, Any]] = [("", value)]
    seen: list[Any] = []
    seen_ids: set[int] = set()
    while todo:
        path, current = todo.pop(0)
        if isinstance(current, Tensor):
            yield path, current
            continue
        if id(current) in seen_ids:
            continue
        seen_ids.add(id(current))
        seen.append(current)  # keeps it alive, so that its id stays unique
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(current, Mapping):
            items = current.items()
        elif isinstance(current, (list, tuple)):
            items = enumerate(current)
        elif (
            not isinstance(current, (nn.Module, type))
            and hasattr(current, "__dict__")
            and not callable(current)
        ):
            items = vars(current).items()
        todo += [(f"{path}.{name}" if path else str(name), item) for name, item in items]
