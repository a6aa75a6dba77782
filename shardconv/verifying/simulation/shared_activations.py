"""Activations that ranks keep for their backward pass: those that are the same on several are kept once.

The ranks of a plan run in one process, and what is replicated on them is equal to the bit: the same operators
ran on the same numbers. Without this, a proof of gradients would hold such activations once for each rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_LEAST = 1 << 12
"""Smaller tensors are not compared, in elements."""


class _Kept:
    """A tensor that some ranks need, and how often it had been written to."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # the tensor itself would refer to the graph that refers to this
        self.version = tensor._version

    def unpacked(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a tensor that is needed for gradients was modified by an inplace operation")
        return self.tensor


class SharedActivations:
    """What the ranks of one run keep. They run in turns, and save tensors in one order."""

    def __init__(self) -> None:
        self._kept: dict[int, weakref.WeakSet[_Kept]] = {}
        """Number of a tensor in the order of a rank -> those that ranks keep under it."""

    @contextmanager
    def of_a_rank(self) -> Iterator[None]:
        """Context of the forward pass of one rank, in its thread."""
        count = 0

        def pack(tensor: Tensor) -> _Kept:
            nonlocal count
            count += 1
            if tensor.numel() < _LEAST or tensor.is_leaf:
                return _Kept(tensor)
            others = self._kept.setdefault(count, weakref.WeakSet())
            for other in others:
                if _is_equal(tensor, other):
                    return other
            kept = _Kept(tensor)
            others.add(kept)
            return kept

        with saved_tensors_hooks(pack, _Kept.unpacked):
            yield


def _is_equal(tensor: Tensor, kept: _Kept) -> bool:
    other = kept.tensor
    if (tensor.shape, tensor.dtype, tensor.stride()) != (other.shape, other.dtype, other.stride()):
        return False
    return other._version == kept.version and torch.equal(tensor, other)
