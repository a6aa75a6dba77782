"""Steps of a plan that return their input, and change its gradient."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .collectives import Communicator
from .tensor_steps import apply, unchanged


class GradReduce:
    """The step ``grad_all_reduce`` of a plan: the identity on a local tensor of any shape.

    Backward: the gradient, a Partial, is all-reduced. (Megatron-LM's f, arXiv 1909.08053, section 3.)
    """

    def __init__(self, comm: Communicator, axes: Iterable[int]) -> None:
        self.comm = comm
        self.axes = comm.real(axes)

    def __call__(self, x: Tensor) -> Tensor:
        return apply(x, unchanged, self._backward) if self.axes else x

    def _backward(self, gradient: Tensor) -> Tensor:
        return self.comm.all_reduce(gradient, self.axes)


class GradDivide:
    """The step ``grad_divide`` of a plan: the identity on a local tensor of any shape.

    Backward: the gradient, replicated, becomes a Partial with equal terms, divided by the number of ranks.
    """

    def __init__(self, comm: Communicator, axes: Iterable[int]) -> None:
        self._count = comm.num_ranks(axes)

    def __call__(self, x: Tensor) -> Tensor:
        return apply(x, unchanged, self._backward)

    def _backward(self, gradient: Tensor) -> Tensor:
        return gradient / self._count
