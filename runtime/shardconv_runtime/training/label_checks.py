"""Labels outside of the vocabulary are errors; on a GPU one call later, as no call waits for the device."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..parallel.id_checks import LaterError
from .token_losses import LossInputError


class LabelCheck:
    """The check of the labels of one loss.

    Args:
        vocab_size: global.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._later = LaterError()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a model has called nothing yet."""
        return type(self)(self._vocab_size)

    def __call__(self, labels: Tensor, ignore_index: int) -> None:
        """Check labels, of any shape and integer dtype.

        Raises:
            LossInputError: labels on a CPU are outside of the vocabulary, or those of the call before on
                another device were. Ranks with the same labels raise in the same call.
        """
        self._later.raise_earlier()
        if labels.numel():
            shape = tuple(labels.shape)
            found = self._found(labels, ignore_index)
            self._later.report(found, lambda x, which: self._require_none(x, shape, ignore_index, which))

    def _found(self, labels: Tensor, ignore_index: int) -> Tensor:
        """The number of bad labels, the position of the first one, and that label: int64 ``[3]``."""
        flat = labels.to(torch.int64).reshape(-1)
        bad = ((flat < 0) | (flat >= self._vocab_size)) & (flat != ignore_index)
        first = bad.to(torch.uint8).argmax()
        return torch.stack([bad.sum(), first, flat[first]])

    def _require_none(self, found: Tensor, shape: tuple[int, ...], ignore_index: int, which: str) -> None:
        count, first, label = found.tolist()
        if not count:
            return
        position = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), shape))
        raise LossInputError(
            f"label {label} at position {position} of labels{which} of shape {shape} is outside of the "
            f"vocabulary of {self._vocab_size} tokens, and is not ignore_index ({ignore_index}); "
            f"{count} labels are"
        )
