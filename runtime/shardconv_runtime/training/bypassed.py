"""A check for code that was not traced, such as a fused kernel, and bypasses the layers that sum activations.

Such code takes the local weights and returns a local term of the sum, without an error. It runs where a
kernel is installed, so the converter has not seen it. The first forward pass for training reveals it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import PlanError
from ..format.plan import ModulePlan
from ..parallel.boundary import renumber


def watch_first_pass(model: nn.Module, modules: Mapping[str, ModulePlan]) -> None:
    """Check in the first forward pass that no module returns sharded activations without their sum.

    A module with row-parallel layers calls one of them if it calls a column-parallel one; otherwise the pass
    raises a ``PlanError``. Compiled code is not watched.

    Args:
        model: of the rank.
        modules: of the plan, by FQN.
    """
    kinds: dict[str, dict[str, list[nn.Module]]] = {}
    for fqn, entry in modules.items():
        if entry.category in ("column", "row"):
            of_parent = kinds.setdefault(fqn.rpartition(".")[0], {"column": [], "row": []})
            of_parent[entry.category].append(model.get_submodule(fqn))
    for parent, found in kinds.items():
        if found["column"] and found["row"]:
            _Watch(parent, model.get_submodule(parent), found["column"], found["row"])


class _Watch:
    """Forward hooks of one module and its parallel layers, until the first pass is over."""

    def __init__(self, fqn: str, parent: nn.Module, columns: list[nn.Module], rows: list[nn.Module]) -> None:
        self._fqn = fqn
        self._is_sharded = self._is_summed = False
        self._handles: list[RemovableHandle] = [
            *(renumber(layer, layer.register_forward_hook(self._after_column)) for layer in columns),
            *(renumber(layer, layer.register_forward_hook(self._after_row)) for layer in rows),
            renumber(parent, parent.register_forward_hook(self._end)),
        ]

    def _after_column(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._is_sharded = True

    def _after_row(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._is_summed = True

    def _end(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_sharded:
            return
        if not self._is_summed:
            raise PlanError(
                f"{self._fqn} computes sharded activations and returns without calling the layer that sums "
                "them: code that was not traced (e.g. a fused kernel for training) bypasses that layer; "
                "disable the kernel"
            )
        for handle in self._handles:
            handle.remove()
