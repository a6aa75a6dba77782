"""Images and videos to call a model with, in the forms in which models take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .image_sizes import ImageSizes
from .input_forms import IMAGES, VIDEOS, Asked
from .patch_forms import FLATTENED, GRIDS, GRIDS_OF_FRAMES, PATCH_POSITIONS, PIXEL_MASK, PatchForms
from .tile_forms import TileForms

PATCHES_WITH_GRID = "hidden_states"
"""Name of the parameter that takes patches, in a part of a model that takes a grid as well."""
_OF_A_TOWER, _TOWER = "_pixel_values", "_vision_config"
"""How the parameter of another tower ends, and its config."""
_SIZES = "image_sizes"
_LARGE_IMAGE = 1 << 20
"""Pixels of an image of which a smaller one is tried first, where the model is told the sizes."""
_LARGE_SIDE = 640
"""Of an image, for code that takes the best of many places in it."""
_NUM_FRAMES = 4
"""Of a video of which the config does not say it."""
_BESIDE_IMAGES = 2
"""The same where images are given as well: a proof runs all of them on numbers."""


@dataclass(frozen=True, slots=True)
class ImageForms:
    """Makes the forms of one model's images, likelier ones first."""

    asked: Asked

    def images(self) -> Iterator[dict[str, Tensor]]:
        """Tiles, patches as further parameters tell of them, pixels, and patches that nothing tells of."""
        asked, image = self.asked, ImageSizes.of(self.asked.config)
        name = asked.first((*IMAGES, PATCHES_WITH_GRID))
        patches = PatchForms(asked, image)
        yield from TileForms(asked, image).tiles(name)
        yield from patches.named(name)
        if name == FLATTENED or asked.first(GRIDS_OF_FRAMES):
            return
        if PIXEL_MASK in asked.parameters and not asked.first(PATCH_POSITIONS):
            yield from self._masked(name, image)
        has_places = asked.first((*GRIDS, *PATCH_POSITIONS))
        yield from () if has_places else patches.of_frames(name)
        yield from self._pixels(name, image)
        yield from () if has_places else patches.unnamed(name)

    def _masked(self, name: str, image: ImageSizes) -> Iterator[dict[str, Tensor]]:
        """A list of one image for each row, with a mask of its pixels or of the images."""
        masks = torch.ones(self.asked.batch, 1, dtype=torch.bool)
        for size in dict.fromkeys((image.divided(), image)):
            pixels = self._random(size, 1)
            yield {
                name: pixels,
                PIXEL_MASK: masks[..., None, None].expand(-1, -1, *pixels.shape[-2:]).clone(),
            }
        yield {name: self._random(image, 1), PIXEL_MASK: masks}

    def _pixels(self, name: str, image: ImageSizes) -> Iterator[dict[str, Tensor]]:
        """One image for each row, with its size; frames of a video; a list of one; a pair; a large one."""
        sizes = {}
        if _SIZES in self.asked.parameters:
            small = [image.small(self.asked.seed)] if image.height * image.width > _LARGE_IMAGE else []
            for each in (*small, image):
                sizes = {_SIZES: torch.tensor([[each.height, each.width]] * self.asked.batch)}
                yield {name: self._random(each), **sizes}
        yield {name: self._random(image), **self._of_other_towers()}
        if image.frames:
            yield self._frames(name, image)
        yield {name: self._random(image, 1), **sizes}
        yield {name: self._random(image, 2)}
        if not image.is_known:
            yield {name: self._random(replace(image, height=_LARGE_SIDE, width=_LARGE_SIDE))}

    def _of_other_towers(self) -> dict[str, Tensor]:
        """The same images in the sizes of further towers, whose configs are named as the parameters are."""
        names = [n for n in self.asked.parameters if n.endswith(_OF_A_TOWER) and n not in IMAGES]
        towers = {n: getattr(self.asked.config, n.removesuffix(_OF_A_TOWER) + _TOWER, None) for n in names}
        return {n: self._random(ImageSizes.of(tower)) for n, tower in towers.items() if tower is not None}

    def _random(self, image: ImageSizes, *counts: int) -> Tensor:
        """Images ``[B, *counts, C, H, W]``."""
        return self.asked.random(self.asked.batch, *counts, image.channels, image.height, image.width)

    def videos(self) -> Iterator[dict[str, Tensor]]:
        """As many frames as the config says, ``[B, T, C, H, W]``."""
        yield self._frames(self.asked.first(VIDEOS), ImageSizes.of(self.asked.config))

    def _frames(self, name: str, image: ImageSizes) -> dict[str, Tensor]:
        few = _BESIDE_IMAGES if name in VIDEOS and self.asked.first(IMAGES) else _NUM_FRAMES
        return {name: self._random(image, image.frames or few)}
