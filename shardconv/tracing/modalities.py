"""Images and sounds to call a model with, in the forms in which models take them.

The parameters of a forward method have telling names, and the config has sizes. Which of the forms is meant
cannot be read off with certainty: they are tried in order (``inputs.py``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config_sizes import all_ints, first_int, has, nodes
from .image_sizes import ImageSizes

IMAGES = ("pixel_values", "image_pixel_values", "flattened_patches")
"""Names of the parameter that takes images."""
VIDEOS = ("pixel_values_videos",)
"""Names of the parameter that takes videos; they are made up where no images are taken."""
SOUNDS = ("input_features", "audio_input_features", "input_values")
"""Names of the parameter that takes sounds: spectra, or samples."""
SERIES = ("past_values",)
"""Names of the parameter that takes measurements over time."""
FORMED = (*IMAGES, *VIDEOS, *SOUNDS, *SERIES)
"""Names of the parameters that are given in forms, where they are required."""
STATES = ("encoder_hidden_states", "cross_attention_states")
"""Names of the parameter that takes the states of an encoder."""

_GRIDS = ("image_grid_thw", "image_grid_hw", "grid_thw")
_PATCHES_WITH_GRID = "hidden_states"
"""Name of the parameter that takes patches, in a part of a model that takes a grid as well."""
_PATCH_POSITIONS = ("spatial_shapes", "image_position_ids", "pixel_position_ids")
_SEEN_IMAGES = ("image_attention_mask",)
"""Names of the parameter that says which images a token sees."""
_FLATTENED = "flattened_patches"
"""Patches of an image, with the row and the column of each in front."""
_SOUND_MASKS = ("input_features_mask", "feature_attention_mask", "audio_attention_mask", "padding_mask")
_MEL_BINS = (
    "num_mel_bins",
    "feature_size",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_size",
    "input_dim",
)
_NUM_STATES = 11
_LARGE_SIDE = 640
"""Of an image, for code that takes the best of many places in it."""
_NUM_STEPS = 64
"""Of a series of which the config does not say it."""
_NUM_FRAMES = 4
"""Of a video of which the config does not say it."""
_SECOND = 16_000
"""Samples of a sound."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way of giving a model one kind of input."""

    kind: str
    """``image``, ``video``, ``audio``, ``series`` or ``states``."""
    tensors: dict[str, Tensor]
    """By parameter; the batch is the first dim, or a factor of it."""
    seen: tuple[str, ...] = ()
    """Parameters that say which images each token sees, ``[B, S, N]``."""

    @property
    def num_images(self) -> int:
        """Of a row: N of images ``[B, N, C, H, W]``."""
        return next(iter(self.tensors.values())).shape[1]


@dataclass(frozen=True, slots=True)
class FormMaker:
    """Makes the forms of one model's inputs."""

    parameters: Collection[str]
    """Names of the forward method's parameters."""
    config: Any
    dtype: torch.dtype
    batch: int
    seed: int
    sizes: Collection[int] = ()
    """Of the model's parameters: likely numbers of bins."""

    def kinds(self) -> list[str]:
        """The kinds of input, beside tokens, that the model may be given."""
        names = {"image": IMAGES, "audio": SOUNDS, "series": SERIES}
        kinds = [kind for kind, known in names.items() if self._first(known)]
        if _PATCHES_WITH_GRID in self.parameters and self._first(_GRIDS):
            kinds.append("image")
        if self._first(VIDEOS) and "image" not in kinds:
            kinds.append("video")
        return kinds + (["states"] if self._takes_states() else [])

    def forms(self, kind: str) -> Iterator[Form]:
        """The forms of one kind, likelier ones first; images are ``[B, C, H, W]`` or lists of patches."""
        makers = {
            "image": self._images,
            "video": self._videos,
            "audio": self._sounds,
            "series": self._series,
            "states": self._states,
        }
        for tensors in makers[kind]():
            yield Form(kind, tensors)
            seen = tuple(n for n in _SEEN_IMAGES if n in self.parameters)
            if kind == "image" and seen and next(iter(tensors.values())).dim() == 5:
                yield Form(kind, tensors, seen)

    def _first(self, names: Collection[str]) -> str:
        return next((n for n in names if n in self.parameters), "")

    def _random(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(shape, generator=generator).to(self.dtype)

    # Images -----------------------------------------------------------------------------------

    def _images(self) -> Iterator[dict[str, Tensor]]:
        name = self._first((*IMAGES, _PATCHES_WITH_GRID))
        image = ImageSizes.of(self.config)
        if name == _FLATTENED:
            yield self._placed_patches(image)
            return
        if self._first(_GRIDS):
            yield self._grids(name, image)
        if self._first(_PATCH_POSITIONS):
            yield self._patches(name, image)
        yield from self._pixels(name, image)
        if not self._first((*_GRIDS, *_PATCH_POSITIONS)):
            patches = self._patches(name, image)
            yield {name: patches[name].flatten(0, 1)}
            yield patches

    def _pixels(self, name: str, image: ImageSizes) -> Iterator[dict[str, Tensor]]:
        """One image for each row; the frames of a video; a list of one image; a pair; a large image."""
        pixels = self._random(self.batch, image.channels, image.height, image.width)
        yield {name: pixels}
        extra = {}
        if "image_sizes" in self.parameters:
            extra["image_sizes"] = torch.tensor([[image.height, image.width]] * self.batch)
            yield {name: pixels, **extra}
        if "pixel_attention_mask" in self.parameters:
            extra["pixel_attention_mask"] = torch.ones(pixels[:, :1].shape, dtype=torch.bool)
        if image.frames:
            yield from self._videos()
        yield {name: pixels[:, None], **extra}
        if "pixel_attention_mask" in self.parameters:
            whole = {"pixel_attention_mask": torch.ones(self.batch, 1, dtype=torch.bool)}
            yield {name: pixels[:, None], **extra, **whole}
        yield {name: self._random(self.batch, 2, *pixels.shape[1:])}
        if not image.is_known:
            yield {name: self._random(self.batch, image.channels, _LARGE_SIDE, _LARGE_SIDE)}

    def _videos(self) -> Iterator[dict[str, Tensor]]:
        """As many frames as the config says, ``[B, T, C, H, W]``."""
        name = self._first((*IMAGES, *VIDEOS))
        image = ImageSizes.of(self.config)
        shape = image.frames or _NUM_FRAMES, image.channels, image.height, image.width
        yield {name: self._random(self.batch, *shape)}

    def _placed_patches(self, image: ImageSizes) -> dict[str, Tensor]:
        """Patches of each image, each behind its row and its column, ``[B, N, 2 + C]``."""
        rows, columns = image.grid(self.seed)
        width = first_int(self.config, ("patch_embed_hidden_size",)) or image.patch_numel
        positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(self.dtype) + 1
        patches = self._random(self.batch, rows * columns, width)
        return {_FLATTENED: torch.cat([positions.expand(self.batch, -1, -1), patches], dim=-1)}

    def _grids(self, name: str, image: ImageSizes) -> dict[str, Tensor]:
        """Patches of all images in one list, and how many there are of each image."""
        rows, columns = image.grid(self.seed)
        patches = self._random(self.batch * rows * columns, image.patch_numel * image.patch_frames)
        grid = self._first(_GRIDS)
        shape = [1, rows, columns] if grid.endswith("thw") else [rows, columns]
        return {name: patches, grid: torch.tensor([shape] * self.batch)}

    def _patches(self, name: str, image: ImageSizes) -> dict[str, Tensor]:
        """Patches of each image in a list, and where they are."""
        rows, columns = image.grid(self.seed)
        tensors = {name: self._random(self.batch, rows * columns, image.patch_numel)}
        if "spatial_shapes" in self.parameters:
            tensors["spatial_shapes"] = torch.tensor([[rows, columns]] * self.batch)
        if "pixel_attention_mask" in self.parameters:
            tensors["pixel_attention_mask"] = torch.ones(self.batch, rows * columns, dtype=torch.long)
        positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
        for name_of_positions in _PATCH_POSITIONS[1:]:
            if name_of_positions in self.parameters:
                tensors[name_of_positions] = positions.expand(self.batch, -1, -1).contiguous()
        return tensors

    # Sounds -----------------------------------------------------------------------------------

    def _sounds(self) -> Iterator[dict[str, Tensor]]:
        for name in (n for n in SOUNDS if n in self.parameters):
            yield from self._samples(name) if name == "input_values" else self._spectra(name)

    def _samples(self, name: str) -> Iterator[dict[str, Tensor]]:
        """As few samples as may do, without and with a channel; a spectrum; a second of samples."""
        samples = _num_samples(self.config, self.seed)
        yield {name: self._random(self.batch, samples), **self._masks(samples)}
        yield {name: self._random(self.batch, 1, samples), **self._masks(samples)}
        longest = first_int(self.config, ("max_length",))
        for bins in all_ints(self.config, _MEL_BINS)[:1] if longest else ():
            yield {name: self._random(self.batch, longest, bins)}
        yield {name: self._random(self.batch, _SECOND - 1000 * bool(self.seed))}

    def _spectra(self, name: str) -> Iterator[dict[str, Tensor]]:
        frames = _num_frames(self.config, self.seed)
        masks = self._masks(frames)
        for bins in sorted(all_ints(self.config, _MEL_BINS), key=lambda n: n not in self.sizes):
            shapes = (self.batch, bins, frames), (self.batch, frames, bins)
            yield from ({name: self._random(*shape), **masks} for shape in shapes)
            yield from ({name: self._random(*shape)} for shape in shapes if masks)

    def _masks(self, length: int) -> dict[str, Tensor]:
        names = [n for n in self.parameters if n in _SOUND_MASKS]
        return {n: torch.ones(self.batch, length, dtype=torch.long) for n in names}

    # Measurements over time ---------------------------------------------------------------------

    def _series(self) -> Iterator[dict[str, Tensor]]:
        """As many steps as the config says, of several channels ``[B, T, C]`` or of one ``[B, T]``."""
        name = self._first(SERIES)
        steps = first_int(self.config, ("context_length",)) or _NUM_STEPS
        channels = first_int(self.config, ("num_input_channels",))
        if channels:
            yield {name: self._random(self.batch, steps, channels)}
        yield {name: self._random(self.batch, steps)}

    # States of an encoder -----------------------------------------------------------------------

    def _takes_states(self) -> bool:
        if not self._first(STATES) or "decoder_input_ids" in self.parameters:
            return False
        flags = ("is_decoder", "add_cross_attention", "cross_attention_layers")
        return any(getattr(self.config, flag, None) for flag in flags)

    def _states(self) -> Iterator[dict[str, Tensor]]:
        names = ("cross_attention_hidden_size", "encoder_hidden_size", "hidden_size")
        widths = [getattr(self.config, n, None) for n in names]
        for width in dict.fromkeys(w for w in widths if isinstance(w, int) and w > 0):
            yield {self._first(STATES): self._random(self.batch, _NUM_STATES - 2 * bool(self.seed), width)}


def _num_frames(config: Any, seed: int) -> int:
    """Frames of a spectrum: as many as positions demand, or as windows divide, or any."""
    positions = first_int(config, ("max_source_positions",))
    window = first_int(config, ("n_window",))
    if positions:
        return 2 * positions
    return 2 * window * (2 - bool(seed)) if window else 104 - 16 * bool(seed)


def _num_samples(config: Any, seed: int) -> int:
    strides = next((v for n in nodes(config) if has(n, "conv_stride") and (v := n.conv_stride)), ())
    step = math.prod(strides) if isinstance(strides, (tuple, list)) else 16
    return step * (23 - 4 * bool(seed)) + step // 4 + 80
