"""Small integers that are packed into words."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32
"""Bits of a word."""


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """The integers of int32 words, the lowest bits first.

    Args:
        words: ``[..., n, ...]``, with n in ``dim``.
        bits: of an integer; divides 32.

    Returns:
        int32 ``[..., n * 32 / bits, ...]``, from 0.
    """
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = WORD // bits
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device).view(shape)
    integers: Tensor = (words.unsqueeze(dim + 1) >> shifts) & (2**bits - 1)
    return integers.flatten(dim, dim + 1)
