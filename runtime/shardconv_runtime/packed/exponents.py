"""Factors that are stored as exponents of two, a byte each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..format.plan import Packing
from .held import WeightSlice

BIAS = 127
NOT_FINITE = 255
VALUES = ("*", "*_blocks", "*_packed", "_*_qdata")
"""Stored tensors with the values themselves."""


def as_factors(stored: Tensor) -> Tensor:
    """Factors in float32 of factors in any dtype; bytes are exponents."""
    return (stored.float() - BIAS).exp2() if stored.dtype == torch.uint8 else stored.float()


def check(packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, name: str) -> None:
    """Check the bytes that are exponents.

    Raises:
        CheckpointError: one stands for no number.
    """
    for part, tensor in tensors.items():
        if part not in VALUES and tensor.dtype == torch.uint8 and (tensor == NOT_FINITE).any():
            raise CheckpointError(f"{name}: its stored tensor {part} has values that are not finite")
