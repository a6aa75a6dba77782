"""The rules of the field ``memory`` of a plan; checked with ``plan_checks`` where a plan has one."""

from __future__ import annotations

from .memory import MemoryPlan
from .plan_checks import fail

MAX_BYTES = 2**53
"""Largest number of bytes, or of tokens of a window."""
MAX_ENTRIES = 64
"""Most moments of a prefill, or terms of a cache."""


def check_memory(memory: MemoryPlan) -> None:
    """Check the rules of ``docs/plan-format.md`` for ``memory``.

    Raises:
        MalformedError: a rule is broken; the message begins with the path of the field.
    """
    for name in ("prefill", "cache"):
        if len(getattr(memory, name)) > MAX_ENTRIES:
            fail(f"memory.{name}", f"more than {MAX_ENTRIES} entries")
    for name in ("sequence_bytes", "fixed_bytes", "logits_token_bytes", "buffer_bytes"):
        _check_bytes(f"memory.{name}", getattr(memory, name))
    for index, term in enumerate(memory.cache):
        _check_bytes(f"memory.cache[{index}].token_bytes", term.token_bytes)
        _check_bytes(f"memory.cache[{index}].window", term.window)
    for index, moment in enumerate(memory.prefill):
        for coefficient in (*moment.sequence, *moment.once):
            if abs(coefficient) > MAX_BYTES:  # a part of a sum may be negative
                fail(f"memory.prefill[{index}]", f"a coefficient is larger than {MAX_BYTES}")


def _check_bytes(where: str, value: int) -> None:
    if not 0 <= value <= MAX_BYTES:
        fail(where, f"must be 0 or more, and at most {MAX_BYTES}")
