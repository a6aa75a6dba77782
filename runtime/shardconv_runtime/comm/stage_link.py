"""How the stages of a pipeline hand tensors on: a rank talks to the ranks of equal place on other stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class StageLink(ABC):
    """The place of one rank in a pipeline.

    All stages run the same code, so that each tensor is sent and received at the same point of it.

    Args:
        stage: of this rank.
        count: of stages.
    """

    def __init__(self, stage: int, count: int) -> None:
        self.stage = stage
        self.count = count
        self.depth = 0
        """How many calls are running in which all stages take part: of the model, or of ``generate``."""
        self.handed_on: set[tuple[str, int]] = set()
        """(module, item) of what this rank sent or received in the running call of the model."""
        self.shares_results = True
        """Whether each call of the model gives its results to all stages; else only the last one has them."""

    @property
    def is_last(self) -> bool:
        """Whether the model's results are computed here."""
        return self.stage == self.count - 1

    @abstractmethod
    def send(self, x: Tensor, stages: Sequence[int]) -> None:
        """Send a tensor, local of any shape, to later stages."""

    @abstractmethod
    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
        """The tensor of this (local) shape that an earlier stage sends next."""

    @abstractmethod
    def share(self, results: Sequence[Tensor]) -> None:
        """Fill the results, of equal (local) shapes on all stages, with those of the last stage, in place."""
