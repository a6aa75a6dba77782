"""Tensors over memory that is there already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tensor_within(storage: Any, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the contiguous tensor of this shape and dtype in a storage.

    Args:
        offset: the offset of its first element, counted in elements of the dtype.
        dtype: the dtype of the tensor.
    """
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, shape)  # type: ignore[call-overload, no-any-return]


def tensor_at(
    storage: torch.UntypedStorage, begin: int, num_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Return the tensor of this shape whose bytes begin at ``begin``; its storage keeps the memory alive."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    if not num_bytes:
        return tensor.reshape(shape)
    stretch: Any = storage[begin : begin + num_bytes]  # the stub knows of single bytes only
    filled: Tensor = tensor.set_(stretch, 0, shape)  # type: ignore[call-overload]
    return filled
