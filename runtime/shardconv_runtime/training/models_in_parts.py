"""The models that were loaded for training on several ranks, for functions that are given tensors alone."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

MODELS: WeakSet[nn.Module] = WeakSet()
"""Each holds this rank's part of every parameter; copies are added when they are first called."""
