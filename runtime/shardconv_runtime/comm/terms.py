"""A step of a plan that makes a replicated tensor a term of a sum over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .collectives import Communicator
from .tensor_steps import apply, unchanged


class KeepOnFirst:
    """The step ``keep_on_first`` of a plan, on a local tensor of any shape: Replicate to Partial.

    The first rank along the axes keeps the tensor, the others have zeros, so that the sum is exact. Backward:
    the gradient of a Partial is the same on all ranks, and so is that of the tensor: it passes.

    Args:
        comm: the ranks.
        axes: mesh axes over which the result is Partial.
        training: it has a backward.
    """

    def __init__(self, comm: Communicator, axes: Iterable[int], training: bool = False) -> None:
        self._is_first = comm.rank == comm.group(axes)[0]
        self._back = unchanged if training else None

    def __call__(self, x: Tensor) -> Tensor:
        return apply(x, self._forward, self._back)

    def _forward(self, x: Tensor) -> Tensor:
        return x.view_as(x) if self._is_first else torch.zeros_like(x)
