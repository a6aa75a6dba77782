"""Layers whose sum is left out by code that was not traced: a fused kernel, say, that takes their weights.

Such code gets the rank's part of the weights and returns the rank's part of the sum, without an error. It
runs where a kernel is installed, and so was not seen by the converter. The first forward pass for training
shows whether it does.
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
    """Have a model raise a ``PlanError`` if a module goes on from split activations without their sum.

    A module with row-parallel layers calls one of them if it calls a column-parallel one. Code that is being
    compiled is not watched.

    Args:
        model: whose modules are those of the rank.
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
        self._is_split = self._is_summed = False
        self._handles: list[RemovableHandle] = [
            *(renumber(layer, layer.register_forward_hook(self._split)) for layer in columns),
            *(renumber(layer, layer.register_forward_hook(self._sum)) for layer in rows),
            renumber(parent, parent.register_forward_hook(self._end)),
        ]

    def _split(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._is_split = True

    def _sum(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._is_summed = True

    def _end(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_split:
            return
        if not self._is_summed:
            raise PlanError(
                f"{self._fqn} has split its activations, and returns without having called the layer that "
                "sums them up: some code, which was not traced, computes it from the rank's weights (a fused "
                "kernel for training, say); run it without that kernel"
            )
        for handle in self._handles:
            handle.remove()
