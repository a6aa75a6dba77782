"""Images and videos to call a model with, in the forms in which models take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .config_sizes import first_int
from .image_sizes import ImageSizes
from .input_forms import IMAGES, VIDEOS, Asked
from .tile_forms import TileForms

_GRIDS_OF_FRAMES = ("image_grid_thw", "grid_thw")
GRIDS = (*_GRIDS_OF_FRAMES, "image_grid_hw")
"""Names of the parameter that says how many rows and columns of patches each image has."""
PATCHES_WITH_GRID = "hidden_states"
"""Name of the parameter that takes patches, in a part of a model that takes a grid as well."""
_PATCH_POSITIONS = ("spatial_shapes", "image_position_ids", "pixel_position_ids")
_PIXEL_MASK = "pixel_attention_mask"
_FLATTENED = "flattened_patches"
"""Patches of an image, with the row and the column of each in front."""
_LARGE_SIDE = 640
"""Of an image, for code that takes the best of many places in it."""
_NUM_FRAMES = 4
"""Of a video of which the config does not say it."""


@dataclass(frozen=True, slots=True)
class ImageForms:
    """Makes the forms of one model's images, likelier ones first."""

    asked: Asked

    def images(self) -> Iterator[dict[str, Tensor]]:
        name = self.asked.first((*IMAGES, PATCHES_WITH_GRID))
        image = ImageSizes.of(self.asked.config)
        if name == _FLATTENED:
            yield self._placed_patches(image)
            return
        yield from TileForms(self.asked, image).tiles(name)
        if self.asked.first(GRIDS):
            yield from self._grids(name, image)
        if self.asked.first(_PATCH_POSITIONS):
            yield self._patches(name, image)
        elif _PIXEL_MASK in self.asked.parameters:
            yield from self._masked(name, image)
        if not self.asked.first(_GRIDS_OF_FRAMES):
            yield from self._pixels(name, image)
        if not self.asked.first((*GRIDS, *_PATCH_POSITIONS)):
            patches = self._patches(name, image)
            yield {name: patches[name].flatten(0, 1)}
            yield patches

    def _masked(self, name: str, image: ImageSizes) -> Iterator[dict[str, Tensor]]:
        """A list of one image for each row, with a mask of its pixels or of the images."""
        masks = torch.ones(self.asked.batch, 1, dtype=torch.bool)
        for size in dict.fromkeys((image.divided(), image)):
            pixels = self._random(size, 1)
            yield {
                name: pixels,
                _PIXEL_MASK: masks[..., None, None].expand(-1, -1, *pixels.shape[-2:]).clone(),
            }
        yield {name: self._random(image, 1), _PIXEL_MASK: masks}

    def _pixels(self, name: str, image: ImageSizes) -> Iterator[dict[str, Tensor]]:
        """One image for each row; the frames of a video; a list of one image; a pair; other sizes."""
        yield {name: self._random(image)}
        sizes = {}
        if "image_sizes" in self.asked.parameters:
            sizes["image_sizes"] = torch.tensor([[image.height, image.width]] * self.asked.batch)
            yield {name: self._random(image), **sizes}
        if image.frames:
            yield from self.videos()
        yield {name: self._random(image, 1), **sizes}
        yield {name: self._random(image, 2)}
        if not image.is_known:
            yield {name: self._random(replace(image, height=_LARGE_SIDE, width=_LARGE_SIDE))}

    def _random(self, image: ImageSizes, *counts: int) -> Tensor:
        """Images ``[B, *counts, C, H, W]``."""
        return self.asked.random(self.asked.batch, *counts, image.channels, image.height, image.width)

    def videos(self) -> Iterator[dict[str, Tensor]]:
        """As many frames as the config says, ``[B, T, C, H, W]``."""
        name = self.asked.first((*IMAGES, *VIDEOS))
        image = ImageSizes.of(self.asked.config)
        yield {name: self._random(image, image.frames or _NUM_FRAMES)}

    def _placed_patches(self, image: ImageSizes) -> dict[str, Tensor]:
        """Patches of each image, each behind its row and its column, ``[B, N, 2 + C]``."""
        rows, columns = image.grid(self.asked.seed)
        width = first_int(self.asked.config, ("patch_embed_hidden_size",)) or image.patch_numel
        positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(self.asked.dtype) + 1
        patches = self.asked.random(self.asked.batch, rows * columns, width)
        return {_FLATTENED: torch.cat([positions.expand(self.asked.batch, -1, -1), patches], dim=-1)}

    def _grids(self, name: str, image: ImageSizes) -> Iterator[dict[str, Tensor]]:
        """Patches of all images in one list, flat or ``[N, C, H, W]``, and how many there are of each."""
        rows, columns = image.grid(self.asked.seed)
        count = self.asked.batch * rows * columns
        grid = self.asked.first(GRIDS)
        shape = [1, rows, columns] if grid.endswith("thw") else [rows, columns]
        grids = {grid: torch.tensor([shape] * self.asked.batch)}
        yield {name: self.asked.random(count, image.patch_numel * image.patch_frames), **grids}
        if image.patch_frames == 1:
            yield {name: self.asked.random(count, image.channels, *image.patch), **grids}

    def _patches(self, name: str, image: ImageSizes) -> dict[str, Tensor]:
        """Patches of each image in a list, and where they are."""
        rows, columns = image.grid(self.asked.seed)
        tensors = {name: self.asked.random(self.asked.batch, rows * columns, image.patch_numel)}
        if "spatial_shapes" in self.asked.parameters:
            tensors["spatial_shapes"] = torch.tensor([[rows, columns]] * self.asked.batch)
        if _PIXEL_MASK in self.asked.parameters:
            tensors[_PIXEL_MASK] = torch.ones(self.asked.batch, rows * columns, dtype=torch.long)
        positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
        for name_of_positions in _PATCH_POSITIONS[1:]:
            if name_of_positions in self.asked.parameters:
                tensors[name_of_positions] = positions.expand(self.asked.batch, -1, -1).contiguous()
        return tensors
