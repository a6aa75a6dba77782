"""Floats of 4 bits: a sign, two bits of exponent, one of mantissa; two in a byte, the first one low."""

from __future__ import annotations

import torch
from torch import Tensor

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = POSITIVE + tuple(-value for value in POSITIVE)
PER_BYTE = 2


def unpacked_fp4(stored: Tensor) -> Tensor:
    """The values of bytes, bfloat16 ``[..., 2 * n]`` of ``[..., n]``."""
    values = torch.tensor(VALUES, dtype=torch.bfloat16, device=stored.device)
    codes = torch.stack([stored & 15, stored >> 4], -1).flatten(-2)
    return values[codes.int()]
