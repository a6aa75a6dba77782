"""Images and videos to call a model with, in the forms in which models take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .config_sizes import first_int
from .image_sizes import ImageSizes
from .input_forms import IMAGES, VIDEOS, Asked

GRIDS = ("image_grid_thw", "image_grid_hw", "grid_thw")
"""Names of the parameter that says how many rows and columns of patches each image has."""
PATCHES_WITH_GRID = "hidden_states"
"""Name of the parameter that takes patches, in a part of a model that takes a grid as well."""
_PATCH_POSITIONS = ("spatial_shapes", "image_position_ids", "pixel_position_ids")
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
        if self.asked.first(GRIDS):
            yield self._grids(name, image)
        if self.asked.first(_PATCH_POSITIONS):
            yield self._patches(name, image)
        yield from self._pixels(name, image)
        if not self.asked.first((*GRIDS, *_PATCH_POSITIONS)):
            patches = self._patches(name, image)
            yield {name: patches[name].flatten(0, 1)}
            yield patches

    def _pixels(self, name: str, image: ImageSizes) -> Iterator[dict[str, Tensor]]:
        """One image for each row; the frames of a video; a list of one image; a pair; a large image."""
        pixels = self.asked.random(self.asked.batch, image.channels, image.height, image.width)
        yield {name: pixels}
        extra = {}
        if "image_sizes" in self.asked.parameters:
            extra["image_sizes"] = torch.tensor([[image.height, image.width]] * self.asked.batch)
            yield {name: pixels, **extra}
        if "pixel_attention_mask" in self.asked.parameters:
            extra["pixel_attention_mask"] = torch.ones(pixels[:, :1].shape, dtype=torch.bool)
        if image.frames:
            yield from self.videos()
        yield {name: pixels[:, None], **extra}
        if "pixel_attention_mask" in self.asked.parameters:
            whole = {"pixel_attention_mask": torch.ones(self.asked.batch, 1, dtype=torch.bool)}
            yield {name: pixels[:, None], **extra, **whole}
        yield {name: self.asked.random(self.asked.batch, 2, *pixels.shape[1:])}
        if not image.is_known:
            yield {name: self.asked.random(self.asked.batch, image.channels, _LARGE_SIDE, _LARGE_SIDE)}

    def videos(self) -> Iterator[dict[str, Tensor]]:
        """As many frames as the config says, ``[B, T, C, H, W]``."""
        name = self.asked.first((*IMAGES, *VIDEOS))
        image = ImageSizes.of(self.asked.config)
        shape = image.frames or _NUM_FRAMES, image.channels, image.height, image.width
        yield {name: self.asked.random(self.asked.batch, *shape)}

    def _placed_patches(self, image: ImageSizes) -> dict[str, Tensor]:
        """Patches of each image, each behind its row and its column, ``[B, N, 2 + C]``."""
        rows, columns = image.grid(self.asked.seed)
        width = first_int(self.asked.config, ("patch_embed_hidden_size",)) or image.patch_numel
        positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(self.asked.dtype) + 1
        patches = self.asked.random(self.asked.batch, rows * columns, width)
        return {_FLATTENED: torch.cat([positions.expand(self.asked.batch, -1, -1), patches], dim=-1)}

    def _grids(self, name: str, image: ImageSizes) -> dict[str, Tensor]:
        """Patches of all images in one list, and how many there are of each image."""
        rows, columns = image.grid(self.asked.seed)
        patches = self.asked.random(self.asked.batch * rows * columns, image.patch_numel * image.patch_frames)
        grid = self.asked.first(GRIDS)
        shape = [1, rows, columns] if grid.endswith("thw") else [rows, columns]
        return {name: patches, grid: torch.tensor([shape] * self.asked.batch)}

    def _patches(self, name: str, image: ImageSizes) -> dict[str, Tensor]:
        """Patches of each image in a list, and where they are."""
        rows, columns = image.grid(self.asked.seed)
        tensors = {name: self.asked.random(self.asked.batch, rows * columns, image.patch_numel)}
        if "spatial_shapes" in self.asked.parameters:
            tensors["spatial_shapes"] = torch.tensor([[rows, columns]] * self.asked.batch)
        if "pixel_attention_mask" in self.asked.parameters:
            tensors["pixel_attention_mask"] = torch.ones(self.asked.batch, rows * columns, dtype=torch.long)
        positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
        for name_of_positions in _PATCH_POSITIONS[1:]:
            if name_of_positions in self.asked.parameters:
                tensors[name_of_positions] = positions.expand(self.asked.batch, -1, -1).contiguous()
        return tensors
