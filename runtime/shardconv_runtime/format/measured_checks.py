"""The rules of what was measured, which are checked where a plan or a manifest has it."""

from __future__ import annotations

from .measured import MemoryPlan, Numerics
from .plan_checks import fail

MAX_BYTES = 2**53
"""Largest number of bytes, or of tokens of a window."""
MAX_ENTRIES = 64
"""Most moments of a prefill, or terms of a cache."""
MAX_NAME_LENGTH = 1000
"""Most characters of the name of an input."""
MAX_DIMS = 64
"""Of an input, as many as torch allows."""


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


def check_numerics(found: Numerics) -> None:
    """Check the rules of ``docs/plan-format.md`` for ``numerics``, of a manifest.

    Raises:
        MalformedError: a rule is broken; the message begins with the path of the field.
    """
    if not 0 <= found.worst <= found.tolerance:
        fail("numerics.worst", "must be from 0 to the tolerance")
    if any(len(text) > MAX_NAME_LENGTH for text in (found.dtype, *found.inputs)):
        fail("numerics", f"a name has more than {MAX_NAME_LENGTH} characters")
    for name, shape in found.inputs.items():
        if len(shape) > MAX_DIMS or any(size < 0 for size in shape):
            fail(f"numerics.inputs.{name}", "expected the sizes of a tensor's dims")


def _check_bytes(where: str, value: int) -> None:
    if not 0 <= value <= MAX_BYTES:
        fail(where, f"must be 0 or more, and at most {MAX_BYTES}")
