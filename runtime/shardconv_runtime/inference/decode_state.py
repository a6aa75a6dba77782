"""Tensors that decoding steps read and write, which stay where they are from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .decode_attention import NAME, ORDINARY, decode_attention
from .decode_cache import Buffers, OneTokenCache, repeat_first
from .sampling import INTEGERS, SMALLEST, History, SamplingMode

MOST_STOP_TOKENS = 32


@dataclass(frozen=True)
class Bucket:
    """Shapes of a step's tensors, and the options of its graph.

    Attributes:
        batch: number of rows, B; a call may have fewer.
        slots: number of tokens, L; the memory is for this many.
        reach: number of slots that a step reads, R, at most ``slots``; the text so far fits into them.
        rings: whether layers with windows hold only the tokens of their window.
        inputs: names of the model's tensor arguments in addition to the ids.
        constants: the model's other arguments.
        choice: how tokens are chosen.
        stops: there are tokens that end a row.
    """

    batch: int
    slots: int
    reach: int
    rings: bool
    inputs: tuple[tuple[str, torch.dtype], ...]
    constants: tuple[tuple[str, Any], ...]
    choice: SamplingMode
    stops: bool


@dataclass(eq=False)
class StepState:
    """The tensors of one bucket.

    Attributes:
        bucket: shapes.
        cache_name: the model's argument for the cache.
        cache: the cache of the tokens so far.
        token: the ids that the next step takes, int64 ``[B, 1]``.
        new_tokens: the chosen tokens, int64 ``[B, L]``, and ``count`` (``[]``) of them.
        position_ids: the position of ``token``, int64 ``[B, 1]``, if the model takes it.
        inputs: other tensor arguments by name: masks ``[B, R]`` and types of tokens ``[B, 1]``, constant.
        masks: the masks among these inputs, with all slots, ``[B, L]``.
        unfinished: 1 for rows that no stop token has ended, int64 ``[B]``.
        done: whether there are none, bool ``[]``.
        pad: id that follows a stop token, int64 ``[]``.
        stop_ids: int64 ``[MOST_STOP_TOKENS]``, -1 if there are fewer.
        numbers: the numbers of the processors, by name.
        seen, stops: see ``History``.
    """

    bucket: Bucket
    cache_name: str
    cache: OneTokenCache
    token: Tensor
    new_tokens: Tensor
    count: Tensor
    unfinished: Tensor
    done: Tensor
    pad: Tensor
    stop_ids: Tensor
    position_ids: Tensor | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Tensor] = field(default_factory=dict)
    seen: Tensor | None = None
    stops: Tensor | None = None

    def history(self) -> History:
        """Return the text as processors know it."""
        return History(self.count, self.seen, self.stops)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``prepare_inputs_for_generation`` other than the ids."""
        arguments: dict[str, Any] = {
            self.cache_name: self.cache,
            **self.inputs,
            **dict(self.bucket.constants),
        }
        if self.position_ids is not None:
            arguments["position_ids"] = self.position_ids
        return arguments

    def append(self, tokens: Tensor) -> None:
        """Add the chosen tokens ``[B]``; a row that has ended gets padding. In place throughout."""
        if self.bucket.stops:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        self.token.copy_(tokens[:, None])
        self.new_tokens.index_copy_(1, self.count.reshape(1), tokens[:, None])
        self.count.add_(1)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        if self.bucket.stops:
            self.unfinished.mul_(1 - torch.isin(tokens, self.stop_ids).to(torch.int64))
            self.done.copy_(self.unfinished.max() == 0)

    def reaching(self, reach: int) -> StepState:
        """Return the same state, whose steps read more slots: all tensors keep their places."""
        inputs = self.inputs | {name: mask[:, :reach] for name, mask in self.masks.items()}
        bucket, cache = replace(self.bucket, reach=reach), self.cache.reaching(reach)
        return replace(self, bucket=bucket, cache=cache, inputs=inputs)

    @contextmanager
    def kept(self, num_steps: int) -> Iterator[None]:
        """Run this many steps from rewound counters within this context; then the state is as before."""
        state_tensors = (
            self.token,
            self.new_tokens,
            self.count,
            self.unfinished,
            self.done,
            self.cache.length,
        )
        more = (x for x in (self.position_ids, self.seen) if x is not None)
        tensors = [*state_tensors, *more, *self.cache.written(num_steps)]
        copies = [tensor.clone() for tensor in tensors]
        yield
        for tensor, before in zip(tensors, copies, strict=True):
            tensor.copy_(before)

    def rewind(self) -> None:
        """Let the next steps write within the buffers, independent of their contents."""
        for counter in (self.cache.length, self.count, self.position_ids):
            if counter is not None:
                counter.zero_()

    def advance(self) -> None:
        """Count the token that the model has taken."""
        self.cache.length.add_(1)
        if self.position_ids is not None:
            self.position_ids.add_(1)


def make_state(
    bucket: Bucket, cache_name: str, cache: OneTokenCache, buffers: Buffers, vocabulary: int
) -> StepState:
    """Return the tensors of a bucket, of undefined content."""
    batch, slots = bucket.batch, bucket.slots

    def ints(name: str, *shape: int) -> Tensor:
        return buffers.get(name, shape, torch.int64)

    state = StepState(
        bucket,
        cache_name,
        cache,
        ints("token", batch, 1),
        ints("new_tokens", batch, slots),
        ints("count"),
        ints("unfinished", batch),
        buffers.get("done", (), torch.bool),
        ints("pad"),
        ints("stop_ids", MOST_STOP_TOKENS),
    )
    for name, dtype in bucket.inputs:
        if name == "position_ids":
            state.position_ids = buffers.get(name, (batch, 1), dtype)
        else:
            is_mask = name == "attention_mask"
            buffer = buffers.get(name, (batch, slots if is_mask else 1), dtype)
            state.inputs[name] = buffer[:, : bucket.reach] if is_mask else buffer
            if is_mask:
                state.masks[name] = buffer
    for name in bucket.choice.numbers:
        dtype = torch.int64 if name in INTEGERS else torch.float32
        state.numbers[name] = buffers.get(f"number {name}", (), dtype)
    if "penalty" in bucket.choice.numbers:
        state.seen = buffers.get("seen", (batch, vocabulary + 1), torch.bool)
    if any(name in bucket.choice.numbers for name in SMALLEST):
        state.stops = buffers.get("stops", (vocabulary + 1,), torch.bool)
    return state


def start_call(
    state: StepState,
    ids: Tensor,
    arguments: dict[str, Any],
    numbers: dict[str, float],
    pad: int | Tensor | None,
    stop_ids: Tensor | None,
) -> None:
    """Set all but the cache for a call.

    Args:
        ids: the prompt, int64 ``[rows, n]``.
    """
    rows = len(ids)
    state.count.zero_()
    state.unfinished.zero_()
    state.unfinished[:rows] = 1
    state.done.zero_()
    state.pad.copy_(torch.as_tensor(0 if pad is None else pad).reshape(()))
    state.stop_ids.fill_(-1)
    if stop_ids is not None:
        state.stop_ids[: stop_ids.numel()] = stop_ids.reshape(-1)
    if state.position_ids is not None:
        _fill_rows(state.position_ids, arguments["position_ids"][..., -1:])
    for name, tensor in state.inputs.items():
        if name in state.masks:
            mask = state.masks[name]
            mask.fill_(1)  # for tokens to come; later positions are masked as such
            _fill_rows(mask[:, : arguments[name].shape[1]], arguments[name])
        else:
            _fill_rows(tensor, arguments[name][..., -1:])
    for name, number in numbers.items():
        state.numbers[name].fill_(number)
    if state.seen is not None:
        state.seen.zero_()
        state.seen[:rows].scatter_(1, ids.clamp(max=state.seen.shape[1] - 1), True)
        repeat_first(state.seen, rows)
    if state.stops is not None:
        state.stops.zero_()
        assert stop_ids is not None, "a least length is about what ends a row"
        state.stops[stop_ids.reshape(-1).clamp(max=len(state.stops) - 1)] = True


def _fill_rows(buffer: Tensor, found: Tensor) -> None:
    buffer[: len(found)] = found.expand(len(found), buffer.shape[1])
    repeat_first(buffer, len(found))


# A call of ``generate`` as transformers has prepared it, if one graph can decode it step by step.

AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[ORDINARY])
