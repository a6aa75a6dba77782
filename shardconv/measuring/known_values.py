"""Values of tensors that no parameter decides, for code that asks while a model runs on the meta device.

Each such tensor has a node: the operator that made it, and the nodes of what that read. It is evaluated when
somebody asks. Nodes hold no tensor of the run, so that these live as long as they would without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..tracing.identities import META
from ..tracing.operators import mutated_arguments, tensors_in
from .weak_table import WeakTable

MAX_NUMEL = 1 << 24
"""Elements of the largest tensor that is evaluated."""
_CPU = torch.device("cpu")


class AsksForValues(Exception):
    """The model's code asks for values that parameters decide, or for very many."""


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """How to compute a tensor, on the CPU."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int
    """Which of the operator's results it is."""
    numel: int

    def compute(self) -> Tensor:
        if self.numel > MAX_NUMEL:
            raise AsksForValues("the model's code asks for the values of a large tensor")
        args, kwargs = pytree.tree_map_only(_Node, _Node.compute, (self.args, self.kwargs))
        if not self.func._schema.is_mutable:
            return tensors_in((self.func(*args, **kwargs),))[self.output]
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        self.func(*args, **kwargs)
        return mutated_arguments(self.func, args, kwargs)[self.output]


class KnownValues:
    """The tensors of one run whose values can be computed."""

    def __init__(self) -> None:
        self._nodes: WeakTable[tuple[_Node, int]] = WeakTable()
        """Tensor -> its node, and the number of writes to its memory before."""
        self._writes: WeakTable[int] = WeakTable()
        """Storage -> number of writes to it so far."""

    def fill(self, tensor: Tensor, value: int) -> None:
        """An input of any shape is this number, repeated."""
        full = torch.ops.aten.full.default
        node = _Node(full, (list(tensor.shape), value), {"dtype": tensor.dtype}, 0, tensor.numel())
        self._nodes[tensor] = node, 0

    def made(self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """An operator that was given ``tensors`` ran on meta."""
        is_mutable = func._schema.is_mutable
        is_known = all(self._operand(t) is not None for t in tensors)
        if not is_mutable and not is_known:
            return
        outputs = mutated_arguments(func, args, kwargs) if is_mutable else tensors_in((result,))
        if is_known:
            args, kwargs = pytree.tree_map_only(Tensor, self._operand, (args, kwargs))
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: _CPU, (args, kwargs))
        for index, tensor in enumerate(outputs):
            writes = self._writes.get(tensor.untyped_storage(), 0) + is_mutable
            if is_mutable:
                self._writes[tensor.untyped_storage()] = writes
            if is_known:
                self._nodes[tensor] = _Node(func, args, kwargs, index, tensor.numel()), writes

    def value(self, tensor: Tensor) -> Tensor:
        """The value, on the CPU and of the tensor's shape.

        Raises:
            AsksForValues: it is not known.
        """
        operand = self._operand(tensor)
        if operand is None:
            raise AsksForValues("the model's code asks for values that depend on its parameters")
        if isinstance(operand, Tensor):
            return operand
        with _disable_current_modes():
            return operand.compute()

    def _operand(self, tensor: Tensor) -> Tensor | _Node | None:
        """A tensor with values, or its node, unless the memory was written through another tensor."""
        if tensor.device != META:
            return tensor
        if tensor not in self._nodes:
            return None
        node, writes = self._nodes[tensor]
        return node if writes == self._writes.get(tensor.untyped_storage(), 0) else None
