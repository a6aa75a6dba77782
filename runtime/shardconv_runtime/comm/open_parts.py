"""Parts of a dim whose size is decided by the input: a sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import PlanError
from ..format.dims import Leaf
from ..format.slices import Mesh, coordinates
from .parts import Parts


class OpenParts(Parts):
    """Equal parts of a dim whose size is decided by the input; the number of ranks divides it."""

    def __init__(self, layout: Leaf, mesh: Mesh, rank: int) -> None:
        super().__init__(layout, mesh)
        self._count = math.prod(mesh[a] for a in self.axes)
        self._index = 0
        for axis in self.axes:
            self._index = self._index * mesh[axis] + coordinates(mesh, rank)[axis]

    def own(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        share = self._share(x, dim)
        return x.narrow(dim, self._index * share, share).contiguous()

    def own_in_zeros(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        share = x.shape[dim]
        before, after = self._index * share, (self._count - self._index - 1) * share
        return F.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (before, after))

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        return x

    def unpadded(self, x: Tensor, dim: int) -> Tensor:
        """See ``Parts``."""
        return x

    def joined(self, members: tuple[Tensor, ...], dim: int) -> Tensor:
        """See ``Parts``."""
        return torch.cat(members, dim)

    def separated(self, x: Tensor, dim: int) -> list[Tensor]:
        """See ``Parts``."""
        return list(torch.split(x, self._share(x, dim), dim))

    def divided(self, x: Tensor, dim: int, axes: Iterable[int]) -> Tensor:
        """See ``Parts``."""
        return x

    def _share(self, x: Tensor, dim: int) -> int:
        size = x.shape[dim]
        if size % self._count:
            raise PlanError(
                f"a sequence of {size} positions cannot be sharded evenly over {self._count} ranks; "
                "the model was called in a way in which its inputs were not padded"
            )
        return size // self._count
