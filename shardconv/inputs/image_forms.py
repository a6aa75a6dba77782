"""Make images: whole, in tiles, or as patches in a list with their rows and columns, or pooled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .config_sizes import ImageSizes, first_int, nodes, pair
from .input_forms import IMAGES, VIDEOS, Asked

IMAGE_SIZES = "image_sizes"
"""The name of the parameter with heights and widths."""


SEEN_TILES = ("cross_attention_mask",)
"""Names of the parameter with the tiles that a token sees."""


_RATIOS = "aspect_ratio_ids"


_RATIO_MASK = "aspect_ratio_mask"


_RESOLUTIONS = ("image_grid_pinpoints",)


_LISTED_RATIOS = ("supported_aspect_ratios",)


GRIDS_OF_FRAMES = ("image_grid_thw", "grid_thw")
"""Names of the parameter with the frames, rows and columns of patches of each image."""
GRIDS = (*GRIDS_OF_FRAMES, "image_grid_hw", "target_sizes")
"""Names of the same parameter, and of one with only rows and columns."""
PATCH_POSITIONS = ("spatial_shapes", "image_position_ids", "pixel_position_ids")
"""Names of the parameter with the positions of patches."""
FLATTENED = "flattened_patches"
"""Patches of an image, each with its row and column in front."""
PIXEL_MASK = "pixel_attention_mask"
_IN_A_ROW = "target_sizes"
"""Name of a grid whose patches are side by side in one image."""
_MERGES_OF_IMAGES = "image_merge_sizes"
_POOLED = "image_token_pooling"
PLACES = (*GRIDS, *PATCH_POSITIONS, _POOLED)
"""Names of parameters with positions of patches."""
_GRIDS_OF_POOLED = "image_grids"
PATCHES_WITH_GRID = "hidden_states"
"""Name of the parameter that takes patches, in a part of a model that also takes a grid."""
_LARGE_IMAGE = 1 << 20
"""Pixels above which a smaller image is tried first, if the model takes the sizes."""
_LARGE_SIDE = 640
"""Side of an image for code that picks the best of many positions in it."""
_NUM_FRAMES = 4
"""Frames of a video if the config has no number."""
_BESIDE_IMAGES = 2
"""Frames of a video together with images, since a proof runs all of them on numbers."""
_OF_A_TOWER, _TOWER = "_pixel_values", "_vision_config"
"""Suffixes of the parameter of another tower, and of its config."""


@dataclass(frozen=True, slots=True)
class TileForms:
    """Make the forms of one model's images in tiles.

    An image has one of the sizes in the config, and as many tiles as cover it; or it has the number of one of
    the ratios in the config.
    """

    asked: Asked
    image: ImageSizes

    def tiles(self, name: str) -> Iterator[dict[str, Tensor]]:
        """Yield tiles ``[B, 1, T, C, H, W]`` with the number of a ratio, or ``[B, T, C, H, W]`` with a
        size."""
        if _RATIOS in self.asked.parameters:
            yield self._of_ratio(name)
        elif IMAGE_SIZES in self.asked.parameters:
            resolutions = _listed(self.asked.config, _RESOLUTIONS)
            if resolutions:  # the size with fewest tiles, after a small image of all of it
                size = min(resolutions, key=lambda s: (s[0] * s[1], s[bool(self.asked.seed)]))
                rows, columns = -(-size[0] // self.image.height), -(-size[1] // self.image.width)
                tiles = self._random(rows * columns + 1)
                yield {name: tiles, IMAGE_SIZES: torch.tensor([size] * self.asked.batch)}

    def _of_ratio(self, name: str) -> dict[str, Tensor]:
        """Make an image with the ratio of most tiles, or another one for another seed."""
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

    def _random(self, *counts: int) -> Tensor:
        image = self.image
        return self.asked.random(self.asked.batch, *counts, image.channels, image.height, image.width)


def _listed(config: Any, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the pairs in a config under one of the names."""
    lists = (getattr(node, name, None) for node in nodes(config) for name in names)
    sizes = next((value for value in lists if isinstance(value, (list, tuple)) and value), ())
    return [p for p in map(pair, sizes) if p is not None]


@dataclass(frozen=True, slots=True)
class PatchForms:
    """Make the forms of one model's images in patches, likelier ones first."""

    asked: Asked
    image: ImageSizes

    def named(self, name: str) -> Iterator[dict[str, Tensor]]:
        """Yield the forms that other parameters ask for."""
        asked, image = self.asked, self.image
        rows, columns = image.grid(asked.seed)
        if name == FLATTENED:  # [B, N, 2 + C]
            width = first_int(asked.config, ("patch_embed_hidden_size",)) or image.patch_numel
            places = _places(rows, columns).to(asked.dtype) + 1
            patches = asked.random(asked.batch, rows * columns, width)
            yield {FLATTENED: torch.cat([places.expand(asked.batch, -1, -1), patches], dim=-1)}
        if _POOLED in asked.parameters:
            yield self._pooled(name)
        grid = asked.first(GRIDS)
        if (
            _IN_A_ROW in asked.parameters
        ):  # all images side by side [1, C, H, N * W], patches are merged twice
            sides = [rows * image.merge, columns * image.merge]
            height, width = image.patch
            pixels = asked.random(1, image.channels, height, asked.batch * sides[0] * sides[1] * width)
            yield {name: pixels, _IN_A_ROW: torch.tensor([sides] * asked.batch)}
        elif grid:  # patches of all images, flat, [N, C, H, W], or merged pixels
            shape = [1, rows, columns] if grid in GRIDS_OF_FRAMES else [rows, columns]
            grids = {grid: torch.tensor([shape] * asked.batch)}
            if _MERGES_OF_IMAGES in asked.parameters:
                grids[_MERGES_OF_IMAGES] = torch.full((asked.batch,), image.merge)
            count = asked.batch * rows * columns
            yield {name: asked.random(count, image.patch_numel * image.patch_frames), **grids}
            if image.patch_frames == 1:
                yield {name: asked.random(count, image.channels, *image.patch), **grids}
                yield {name: self._channels_last(count, 1, image.merge), **grids}
        if asked.first(PATCH_POSITIONS):
            yield self.of_images(name)

    def unnamed(self, name: str) -> Iterator[dict[str, Tensor]]:
        """Yield the forms for which there are no other parameters."""
        patches = self.of_images(name)
        yield {name: patches[name].flatten(0, 1)}
        yield patches

    def of_frames(self, name: str) -> Iterator[dict[str, Tensor]]:
        """Yield two patches of each image in one list, if patches have several frames."""
        if self.image.patch_frames > 1:
            yield {name: self._channels_last(2 * self.asked.batch, self.image.patch_frames, 1)}

    def of_images(self, name: str) -> dict[str, Tensor]:
        """Return patches of each image in a list ``[B, N, C * H * W]``, and their positions."""
        asked, (rows, columns) = self.asked, self.image.grid(self.asked.seed)
        tensors = {name: asked.random(asked.batch, rows * columns, self.image.patch_numel)}
        if "spatial_shapes" in asked.parameters:
            tensors["spatial_shapes"] = torch.tensor([[rows, columns]] * asked.batch)
        if PIXEL_MASK in asked.parameters:
            tensors[PIXEL_MASK] = torch.ones(asked.batch, rows * columns, dtype=torch.long)
        for positions in PATCH_POSITIONS[1:]:
            if positions in asked.parameters:
                tensors[positions] = _places(rows, columns).flip(-1).expand(asked.batch, -1, -1).contiguous()
        return tensors

    def _pooled(self, name: str) -> dict[str, Tensor]:
        """Return all patches of each image ``[B, N, H * W * C]``, and the patches of each feature ``[T, merge
        ** 2]``.

        There are rows and columns of features for a small image, and none for a large one.
        """
        asked, image = self.asked, self.image
        rows, columns = image.height // image.patch[0], image.width // image.patch[1]
        merge, counts = image.merge, (rows // image.merge, columns // image.merge)
        places = _places(*counts)[:, None] * merge + _places(merge, merge)
        of_one = places[..., 0] * columns + places[..., 1]
        indices = torch.cat([of_one + k * rows * columns for k in range(asked.batch)])
        tensors = {
            name: asked.random(asked.batch, rows * columns, image.patch_numel),
            _POOLED: indices,
            _GRIDS_OF_POOLED: torch.tensor([[*counts, 0, 0]] * asked.batch),
        }
        return {n: t for n, t in tensors.items() if n in asked.parameters}

    def _channels_last(self, count: int, frames: int, merge: int) -> Tensor:
        """Return pixels ``[N, T, H, W, C]`` of squares of patches."""
        height, width = (merge * n for n in self.image.patch)
        return self.asked.random(count, frames, height, width, self.image.channels)


def _places(rows: int, columns: int) -> Tensor:
    """Return row and column ``[rows * columns, 2]`` of all patches."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns))


@dataclass(frozen=True, slots=True)
class ImageForms:
    """Make the forms of one model's images, likelier ones first."""

    asked: Asked

    def images(self) -> Iterator[dict[str, Tensor]]:
        """Yield tiles, patches as other parameters describe them, pixels, and patches without other
        parameters."""
        asked, image = self.asked, ImageSizes.of(self.asked.config)
        name = asked.first((*IMAGES, PATCHES_WITH_GRID))
        patches = PatchForms(asked, image)
        yield from TileForms(asked, image).tiles(name)
        yield from patches.named(name)
        if name == FLATTENED or asked.first(GRIDS_OF_FRAMES):
            return
        if PIXEL_MASK in asked.parameters and not asked.first(PATCH_POSITIONS):
            # A list of one image for each row, with a mask of its pixels or of the images.
            masks = torch.ones(asked.batch, 1, dtype=torch.bool)
            for size in dict.fromkeys((image.divided(), image)):
                pixels = self._random(size, 1)
                mask = masks[..., None, None].expand(-1, -1, *pixels.shape[-2:]).clone()
                yield {name: pixels, PIXEL_MASK: mask}
            yield {name: self._random(image, 1), PIXEL_MASK: masks}
        has_places = asked.first((*GRIDS, *PATCH_POSITIONS))
        yield from () if has_places else patches.of_frames(name)
        # One image for each row, with its size; frames of a video; a list of one image; a pair; a large
        # image.
        sizes = {}
        if IMAGE_SIZES in asked.parameters:
            small = [image.small(asked.seed)] if image.height * image.width > _LARGE_IMAGE else []
            for each in (*small, image):
                sizes = {IMAGE_SIZES: torch.tensor([[each.height, each.width]] * asked.batch)}
                yield {name: self._random(each), **sizes}
        # Other towers get the same images in their sizes. Their configs are named like the parameters.
        names = [n for n in asked.parameters if n.endswith(_OF_A_TOWER) and n not in IMAGES]
        towers = {n: getattr(asked.config, n.removesuffix(_OF_A_TOWER) + _TOWER, None) for n in names}
        tensors = {n: self._random(ImageSizes.of(t)) for n, t in towers.items() if t is not None}
        yield {name: self._random(image), **tensors}
        if image.frames:
            yield self._frames(name, image)
        yield {name: self._random(image, 1), **sizes}
        yield {name: self._random(image, 2)}
        if not image.is_known:
            yield {name: self._random(replace(image, height=_LARGE_SIDE, width=_LARGE_SIDE))}
        yield from () if has_places else patches.unnamed(name)

    def _random(self, image: ImageSizes, *counts: int) -> Tensor:
        """Return images ``[B, *counts, C, H, W]``."""
        return self.asked.random(self.asked.batch, *counts, image.channels, image.height, image.width)

    def videos(self) -> Iterator[dict[str, Tensor]]:
        """Yield the frames of a video, ``[B, T, C, H, W]``."""
        yield self._frames(self.asked.first(VIDEOS), ImageSizes.of(self.asked.config))

    def _frames(self, name: str, image: ImageSizes) -> dict[str, Tensor]:
        few = _BESIDE_IMAGES if name in VIDEOS and self.asked.first(IMAGES) else _NUM_FRAMES
        return {name: self._random(image, image.frames or few)}
