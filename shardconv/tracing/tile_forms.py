"""Images that come in tiles, each of the size that the config says.

The size of an image is among those that the config lists, and its tiles are as many as cover it; or each
image has the number of a ratio that the config lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config_sizes import first_int, nodes, pair
from .image_sizes import ImageSizes
from .input_forms import Asked

SEEN_TILES = ("cross_attention_mask",)
"""Names of the parameter that says which tiles a token sees."""
_RATIOS = "aspect_ratio_ids"
_RATIO_MASK = "aspect_ratio_mask"
_RESOLUTIONS = ("image_grid_pinpoints",)
_LISTED_RATIOS = ("supported_aspect_ratios",)
_SIZES = "image_sizes"


@dataclass(frozen=True, slots=True)
class TileForms:
    """Makes the forms of one model's images in tiles."""

    asked: Asked
    image: ImageSizes

    def tiles(self, name: str) -> Iterator[dict[str, Tensor]]:
        """Tiles ``[B, 1, T, C, H, W]`` with the number of a ratio, or ``[B, T, C, H, W]`` with a size."""
        if _RATIOS in self.asked.parameters:
            yield self._of_ratio(name)
        elif _SIZES in self.asked.parameters:
            resolutions = _listed(self.asked.config, _RESOLUTIONS)
            if resolutions:
                yield self._of_size(name, resolutions)

    def _of_ratio(self, name: str) -> dict[str, Tensor]:
        """The image has the ratio of most tiles, another one for another seed."""
        ratios = _listed(self.asked.config, _LISTED_RATIOS) or [(1, 1)]
        number = sorted(range(len(ratios)), key=lambda k: ratios[k][0] * ratios[k][1])[
            -1 - bool(self.asked.seed)
        ]
        used = ratios[number][0] * ratios[number][1]
        tiles = max(first_int(self.asked.config, ("max_num_tiles",)), *(a * b for a, b in ratios))
        mask = torch.zeros(self.asked.batch, 1, tiles, dtype=torch.long)
        mask[..., :used] = 1
        tensors = {
            name: self._random(1, tiles),
            _RATIOS: torch.full((self.asked.batch, 1), number + 1),
            _RATIO_MASK: mask,
        }
        return {n: t for n, t in tensors.items() if n in self.asked.parameters}

    def _of_size(self, name: str, resolutions: list[tuple[int, int]]) -> dict[str, Tensor]:
        """The image has the listed size of fewest tiles, behind a small one of all of it."""
        size = min(resolutions, key=lambda s: (s[0] * s[1], s[bool(self.asked.seed)]))
        rows, columns = -(-size[0] // self.image.height), -(-size[1] // self.image.width)
        return {name: self._random(rows * columns + 1), _SIZES: torch.tensor([size] * self.asked.batch)}

    def _random(self, *counts: int) -> Tensor:
        image = self.image
        return self.asked.random(self.asked.batch, *counts, image.channels, image.height, image.width)


def _listed(config: Any, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """The pairs that a config lists under one of some names."""
    lists = (getattr(node, name, None) for node in nodes(config) for name in names)
    found = next((value for value in lists if isinstance(value, (list, tuple)) and value), ())
    return [p for p in map(pair, found) if p is not None]
