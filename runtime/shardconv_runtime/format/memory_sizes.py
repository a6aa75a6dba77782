"""The bytes that a rank needs beside its weights, for a batch and lengths.

``docs/plan-format.md`` has the formulas.
"""

from __future__ import annotations

from .measured import CacheTerm, LiveBytes, MemoryPlan


def cache_bytes(memory: MemoryPlan, batch: int, length: int, source_length: int = 0) -> int:
    """Bytes of the cache on a rank.

    Args:
        memory: of the rank.
        batch: number of sequences.
        length: tokens of each in the cache, as after a decoding step.
        source_length: tokens of each that an encoder has read.
    """
    sequence = sum(_term_bytes(term, length, source_length) for term in memory.cache)
    return memory.fixed_bytes + batch * (memory.sequence_bytes + sequence)


def prefill_bytes(memory: MemoryPlan, batch: int, length: int) -> int:
    """Most bytes of live tensors, but for weights and the cache, while a prompt is read.

    Args:
        memory: of the rank.
        batch: number of sequences.
        length: tokens of each.
    """
    return max((moment_bytes(moment, batch, length) for moment in memory.prefill), default=0)


def moment_bytes(moment: LiveBytes, batch: int, length: int) -> int:
    """Bytes at one moment of a forward pass of a batch of sequences of one length."""
    powers = (1, length, length * length)
    return sum(
        (batch * each + other) * power
        for each, other, power in zip(moment.sequence, moment.once, powers, strict=True)
    )


def _term_bytes(term: CacheTerm, length: int, source_length: int) -> int:
    """Bytes of one sequence."""
    num_tokens = source_length if term.source else length
    return term.token_bytes * (min(num_tokens, term.window) if term.window else num_tokens)
