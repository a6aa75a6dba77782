"""Measurements of a converted model: the bytes that a rank needs, and how its numbers compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .field_checks import fail

MAX_BYTES = 2**53
"""Largest number of bytes, or of tokens of a window."""
MAX_ENTRIES = 64
"""Most moments of a prefill, or terms of a cache."""
MAX_NAME_LENGTH = 1000
"""Most characters of the name of an input."""
MAX_DIMS = 64
"""Most dims of an input, as in torch."""


def _check_bytes(**values: int) -> None:
    for name, value in values.items():
        if not 0 <= value <= MAX_BYTES:
            fail(name, f"must be 0 or more, and at most {MAX_BYTES}")


@dataclass(frozen=True, slots=True)
class CacheTerm:
    """Tensors of the cache that grow with the tokens of a sequence."""

    token_bytes: int
    """Bytes for each token of a sequence that is kept."""
    window: int = 0
    """Most tokens that are kept; 0: all."""
    source: bool = False
    """Whether the tokens of the encoder are counted instead of the decoder's."""

    def __post_init__(self) -> None:
        _check_bytes(token_bytes=self.token_bytes, window=self.window)


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """Bytes of the tensors that are alive at one moment of a forward pass.

    A polynomial in the length, whose coefficients have a part for each sequence of the batch: bytes, bytes
    for each token, bytes for each pair of tokens.
    """

    sequence: tuple[int, int, int]
    """Bytes for each sequence of the batch."""
    once: tuple[int, int, int] = (0, 0, 0)
    """Bytes that do not depend on the batch."""

    def __post_init__(self) -> None:
        # A part of a sum may be negative.
        if any(abs(coefficient) > MAX_BYTES for coefficient in (*self.sequence, *self.once)):
            fail("", f"a coefficient is larger than {MAX_BYTES}")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory that the largest rank needs in addition to its weights, from a run of its model on meta."""

    prefill: tuple[LiveBytes, ...]
    """The moments of a prefill for the logits of the last token that may need most."""
    cache: tuple[CacheTerm, ...] = ()
    sequence_bytes: int = 0
    """The bytes of the states in the cache that each sequence has, independent of its length."""
    fixed_bytes: int = 0
    """The bytes of tensors that a cache has once."""
    logits_token_bytes: int = 0
    """The bytes of the logits of one token, gathered if the model gathers them."""
    buffer_bytes: int = 0
    """The bytes of the buffers that no file holds, which come on top of the weights."""

    def __post_init__(self) -> None:
        for name, entries in (("prefill", self.prefill), ("cache", self.cache)):
            if len(entries) > MAX_ENTRIES:
                fail(name, f"more than {MAX_ENTRIES} entries")
        _check_bytes(
            sequence_bytes=self.sequence_bytes,
            fixed_bytes=self.fixed_bytes,
            logits_token_bytes=self.logits_token_bytes,
            buffer_bytes=self.buffer_bytes,
        )


@dataclass(frozen=True, slots=True)
class Numerics:
    """How the ranks of a directory compare with the unsharded model, run on the weights in its files.

    It holds for the plan and the files of the same manifest, and for nothing else.
    """

    worst: float
    """Largest difference of an output of the model, relative to its largest value."""
    tolerance: float
    """The largest difference that was allowed."""
    dtype: str
    """The dtype in which both were run."""
    inputs: Mapping[str, tuple[int, ...]]
    """Global shapes of the inputs by name, as ``input_ids`` ``[B, S]``."""
    quantization: float | None = None
    """Largest difference of an output when the weights are not quantized, relative to its largest value.
    None: the model was not quantized when it was converted, or not compared with its source."""

    def __post_init__(self) -> None:
        if self.quantization is not None and not 0 <= self.quantization < math.inf:
            fail("quantization", "must be finite and not negative")
        if not 0 <= self.worst <= self.tolerance:
            fail("worst", "must be from 0 to the tolerance")
        if any(len(text) > MAX_NAME_LENGTH for text in (self.dtype, *self.inputs)):
            fail("", f"a name has more than {MAX_NAME_LENGTH} characters")
        for name, shape in self.inputs.items():
            if len(shape) > MAX_DIMS or any(size < 0 for size in shape):
                fail(f"inputs.{name}", "expected the sizes of a tensor's dims")


# The bytes that a rank needs in addition to its weights, for a batch and lengths.
#
# ``docs/plan-format.md`` has the formulas.


def cache_bytes(memory: MemoryPlan, batch: int, length: int, source_length: int = 0) -> int:
    """Return the bytes of the cache on a rank."""
    sequence = memory.sequence_bytes
    for term in memory.cache:
        num_tokens = source_length if term.source else length
        sequence += term.token_bytes * (min(num_tokens, term.window) if term.window else num_tokens)
    return memory.fixed_bytes + batch * sequence


def prefill_bytes(memory: MemoryPlan, batch: int, length: int) -> int:
    """Return the peak bytes of live tensors, without weights and cache, while a prompt is read."""
    return max((moment_bytes(moment, batch, length) for moment in memory.prefill), default=0)


def moment_bytes(moment: LiveBytes, batch: int, length: int) -> int:
    """Return the bytes at one moment of a forward pass of a batch of sequences of one length."""
    powers = (1, length, length * length)
    return sum(
        (batch * each + other) * power
        for each, other, power in zip(moment.sequence, moment.once, powers, strict=True)
    )
