"""How a rank that holds some of the experts multiplies: by groups of tokens, in decoding as well.

On a GPU, transformers decodes with "batched_mm": it copies the matrices of each token's experts, and
multiplies by all of them. A rank would do so for the tokens of other ranks' experts, too, with a weight of
zero: the result is right, and each rank does the work of all. "grouped_mm" reads the matrices of its own
experts that have tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

BATCHED, GROUPED = "batched_mm", "grouped_mm"
"""Transformers' names."""


def keep_grouped(model: nn.Module) -> None:
    """Have a model's ``set_experts_implementation``, which decoding calls, take grouped products for batched.

    Other dtypes than bfloat16 stay as they are: for them no grouped product can be recorded in a CUDA graph.
    """
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation = MethodType(_set, model)  # type: ignore[assignment]


def _set(self: Any, experts_implementation: str | Mapping[str, str]) -> None:
    chosen: Any = experts_implementation
    if self.dtype == torch.bfloat16:
        is_one = isinstance(chosen, str)
        chosen = _grouped(chosen) if is_one else {name: _grouped(value) for name, value in chosen.items()}
    type(self).set_experts_implementation(self, chosen)


def _grouped(implementation: str) -> str:
    return GROUPED if implementation == BATCHED else implementation
