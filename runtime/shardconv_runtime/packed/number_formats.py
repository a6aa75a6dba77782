"""Numbers of few bits: exponents of two in a byte, floats of four and eight bits, integers in words."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = POSITIVE + tuple(-value for value in POSITIVE)
"""Floats of 4 bits: a sign, two bits of exponent, one of mantissa; two in a byte, the first one low."""
PER_BYTE = 2


def unpacked_fp4(stored: Tensor) -> Tensor:
    """Look up the values of bytes: bfloat16 ``[..., 2 * n]`` of ``[..., n]``."""
    values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16, device=stored.device)
    codes = torch.stack([stored & 15, stored >> 4], -1).flatten(-2)
    return looked_up(values, codes)


def from_float8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert floats of 8 bits to a dtype with more; torch takes five times as long on a CPU."""
    if values.device.type != "cpu":
        return values.to(dtype)
    return looked_up(
        torch.arange(256, dtype=torch.uint8).view(values.dtype).to(dtype), values.view(torch.uint8)
    )


def looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return the entries of a table for integers of any shape; indexing takes four times as long."""
    return table.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


WORD = 32
"""Bits of a word."""


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Return the integers of int32 words, the lowest bits first.

    Args:
        words: ``[..., n, ...]``, with n in ``dim``.
        bits: the bits of an integer; divides 32.

    Returns:
        int32 ``[..., n * 32 / bits, ...]``, from 0.
    """
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = WORD // bits
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device).view(shape)
    integers: Tensor = (words.unsqueeze(dim + 1) >> shifts) & (2**bits - 1)
    return integers.flatten(dim, dim + 1)


BIAS = 127
NOT_FINITE = 255


def as_factors(stored: Tensor) -> Tensor:
    """Convert factors of any dtype to float32; bytes are exponents."""
    return (stored.float() - BIAS).exp2() if stored.dtype == torch.uint8 else stored.float()


def check_exponents(factors: Mapping[str, Tensor], name: str) -> None:
    """Check that bytes that are exponents are numbers, or raise ``CheckpointError``."""
    for part, tensor in factors.items():
        if tensor.dtype == torch.uint8 and (tensor == NOT_FINITE).any():
            raise CheckpointError(f"{name}: its stored tensor {part} has values that are not finite")
