"""Images in crops to call a model with: the image made small, and the parts that it is cut into."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .config_sizes import first_int
from .image_sizes import ImageSizes
from .input_forms import IMAGES, Asked

_SIZES, _MASK = "image_sizes", "image_attention_mask"
"""Names of the parameters that say how large an image is, and which patches of a crop are part of it."""
_NUM_CROPS = 2


def crops(asked: Asked) -> Iterator[dict[str, Tensor]]:
    """An image beside its crops ``[B, 1 + N, C, H, W]``, where the config knows the side of a crop."""
    side = first_int(asked.config, ("crop_size",))
    if not side or _SIZES not in asked.parameters or _MASK not in asked.parameters:
        return
    image = ImageSizes.of(asked.config)
    shape = asked.batch, 1 + _NUM_CROPS
    yield {
        asked.first(IMAGES): asked.random(*shape, image.channels, side, side),
        _SIZES: torch.tensor([[side, _NUM_CROPS * side]] * asked.batch),
        _MASK: torch.ones(*shape, side // image.patch[0], side // image.patch[1], dtype=torch.long),
    }
