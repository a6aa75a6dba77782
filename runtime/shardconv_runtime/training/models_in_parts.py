"""The models that were loaded for training on several ranks, for functions that are given tensors alone."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

MODELS: WeakSet[nn.Module] = WeakSet()
"""Each holds this rank's part of every parameter; copies are added when they are first called."""


def models_of(parameters: Iterable[object]) -> list[nn.Module]:
    """Those of ``MODELS`` that have some of these parameters."""
    given = set(parameters)  # by identity
    return [model for model in MODELS if any(parameter in given for parameter in model.parameters())]
