"""Memory that decoding steps keep from call to call, and share between their buckets."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Buffers:
    """Named flat memory, of which each bucket takes a view: it is as large as the largest bucket needs.

    Attributes:
        device: where it is.
        generation: counts how often memory moved; whatever has recorded addresses is void then.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}
        self.generation = 0

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor; of undefined content, since other buckets write there."""
        key = (name, dtype)
        count = math.prod(shape)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < count:
            self.generation += flat is not None
            with torch.inference_mode(False):  # calls in inference mode and others write to it
                self._flat[key] = flat = torch.zeros(max(count, 1), dtype=dtype, device=self.device)
        return flat[:count].view(shape)

    @property
    def num_bytes(self) -> int:
        """All memory held."""
        return sum(flat.nbytes for flat in self._flat.values())


def repeat_first(buffer: Tensor, num_rows: int) -> None:
    """Let the rows of ``[B, ...]`` that no call asked for, after ``num_rows``, repeat the first."""
    if num_rows < len(buffer):
        buffer[num_rows:] = buffer[:1]
