"""Tensors in the memory of a storage, which are no views of each other to autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def tensor_within(storage: Any, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the contiguous tensor of this shape and dtype in a storage.

    Args:
        storage: untyped.
        offset: the offset of its first element, counted in elements of the dtype.
        shape: the shape of the tensor.
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


def joined(parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the tensor that spans these along their first dim, and these in its memory, each in a separate
    storage.

    Their numbers are moved next to each other if they are not.

    Args:
        parts: tensors of one dtype, on one device, whose shapes differ only in the first dim.
    """
    first = parts[0]
    with torch.no_grad(), torch.inference_mode(first.is_inference()):
        shape = (sum(len(part) for part in parts), *first.shape[1:])
        if not first.is_meta and _are_adjacent(parts):
            whole = tensor_within(first.untyped_storage(), int(first.storage_offset()), shape, first.dtype)
        else:
            whole = torch.empty(shape, dtype=first.dtype, device=first.device)
        if whole.is_meta:
            return whole, list(parts)
        own, at = [], int(whole.storage_offset()) * whole.itemsize
        for part in parts:
            own.append(tensor_at(whole.untyped_storage(), at, part.nbytes, part.dtype, tuple(part.shape)))
            if own[-1].data_ptr() != part.data_ptr():
                own[-1].copy_(part)
            at += part.nbytes
    return whole, own


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    """Return whether tensors are in one storage, one after another."""
    at = parts[0].storage_offset()
    storage = parts[0].untyped_storage()._cdata
    for part in parts:
        if not (part.is_contiguous() and part.untyped_storage()._cdata == storage):
            return False
        if part.storage_offset() != at:
            return False
        at += part.numel()
    return True
