"""Other weights and inputs for models that fail on the first ones.

Code divides by what it counts, takes logarithms, or asks for what the first random numbers do not give. Such
a model is tried with a few others, always the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...tracing.inputs import TraceInputs
from ..simulation.simulated_weights import Draw
from .simulate import Case

_DRAWS = (Draw(1), Draw(2, 0.25), Draw(3, 4.0))


def other_numbers(case: Case) -> Iterator[tuple[str, Case]]:
    """The case as it is and with other numbers, and in words what these are."""
    yield f"weights of {case.draw}", case
    for draw in _DRAWS:
        yield f"weights of {draw}", replace(case, draw=draw)
    yield "ids in reverse order", replace(case, inputs=_reversed(case.inputs))


def _reversed(inputs: TraceInputs) -> TraceInputs:
    """The ids of each row in reverse order, so that there are as many of each."""
    ids = {n: t.flip(1) for n, t in inputs.tensors.items() if _is_per_token(n, inputs)}
    return replace(inputs, tensors={**inputs.tensors, **ids})


def _is_per_token(name: str, inputs: TraceInputs) -> bool:
    tensor, ids = inputs.tensors[name], inputs.tensors.get("input_ids")
    if ids is None or tensor.is_floating_point() or name.endswith("attention_mask"):
        return False
    return tensor.shape[:2] == ids.shape[:2]
