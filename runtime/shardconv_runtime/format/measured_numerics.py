"""The result of ``verify --numerics``, which the manifest keeps for the files that it was measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .typed_json import MalformedError

MAX_NAME_LENGTH = 1000
"""Most characters of the name of an input."""

MAX_DIMS = 64
"""Of an input, as many as torch allows."""


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
    """That both were run in."""
    inputs: Mapping[str, tuple[int, ...]]
    """Global shapes of the inputs by name, as ``input_ids`` ``[B, S]``."""


def check_numerics(found: Numerics) -> None:
    """Check the values of a result.

    Raises:
        MalformedError: a number or a text is out of bounds.
    """
    if not 0 <= found.worst <= found.tolerance:
        raise MalformedError("numerics.worst", "must be from 0 to the tolerance")
    if any(len(text) > MAX_NAME_LENGTH for text in (found.dtype, *found.inputs)):
        raise MalformedError("numerics", f"a name has more than {MAX_NAME_LENGTH} characters")
    for name, shape in found.inputs.items():
        if len(shape) > MAX_DIMS or any(size < 0 for size in shape):
            raise MalformedError(f"numerics.inputs.{name}", "expected the sizes of a tensor's dims")
