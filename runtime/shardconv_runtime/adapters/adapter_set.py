"""The adapters that a model is loaded with."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..format.plan import Plan
from .adapted_tensors import adapted_tensors, require_base
from .attaching import Attached, attach
from .combined import named
from .directory import Given, PlannedAdapter, read_adapters


@dataclass(frozen=True)
class AdapterSet:
    """Adapters of one model, and its plan with all of them."""

    base: Plan
    """Of the model without them."""
    adapters: Mapping[str, PlannedAdapter]
    """By name; the first one is active."""

    @staticmethod
    def read(given: Given, base: Plan) -> AdapterSet:
        """Read them; errors are those of ``read_adapters``."""
        return AdapterSet(base, read_adapters(given))

    @cached_property
    def plan(self) -> Plan:
        """Of the model with the adapters."""
        ((name, first),) = self.adapters.items()
        return named(first.plan, name)

    @property
    def content(self) -> str:
        """The same text for the same adapters under the same names in the same order."""
        return ", ".join(f"{name}: {each.content}" for name, each in self.adapters.items())

    def attach(self, model: nn.Module, *, trainable: bool) -> Attached:
        """Put them into a model on meta, in place; arguments and errors as for ``attach``.

        Raises:
            PlanError: they were adapted for another conversion.
        """
        adapters = {name: each.adapter for name, each in self.adapters.items()}
        attached = attach(model, adapters, trainable=trainable)
        require_base(self.base, self.plan, attached)
        return attached

    def tensors(
        self,
        stored: Generator[tuple[str, Tensor]],
        attached: Attached,
        rank: int,
        device: torch.device,
    ) -> Generator[tuple[str, Tensor]]:
        """The local tensors of the model with adapters, see ``adapted_tensors``."""
        return adapted_tensors(stored, self.base, self.plan, attached, rank, device)
