"""The inputs beside tokens to call a model with: images, sounds, measurements, states of an encoder.

The parameters of a forward method have telling names, and the config has sizes. Which of the forms is meant
cannot be read off with certainty: they are tried in order (``trace_inputs.py``).

The richest forms come first: images and audio together, each of them separately, then none. Of images
there are several forms: tiles with their sizes or ratios, patches with their positions, one image per
row, frames of a video, lists of images. Audio is tried with few samples and with a second of them. A form
whose parameters have telling names comes first. If the error of the model names what it needs (a number
of features, the length of a mask, a divisor, a width), that is tried at once. A required input of which
nothing is known gets the width that the first matrix product with it needs. An input that the forward
pass does not read does not count as given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .config_sizes import ImageSizes, all_ints, first_int, has, nodes
from .input_forms import ENTITIES, IMAGES, SERIES, SOUNDS, STATES, VIDEOS, Asked, InputForm
from .patch_forms import (
    FLATTENED,
    GRIDS,
    GRIDS_OF_FRAMES,
    PATCH_POSITIONS,
    PIXEL_MASK,
    PLACES,
    SEEN_TILES,
    PatchForms,
    TileForms,
)

# Images and videos to call a model with, in the forms in which models take them.

PATCHES_WITH_GRID = "hidden_states"
"""Name of the parameter that takes patches, in a part of a model that takes a grid as well."""
_OF_A_TOWER, _TOWER = "_pixel_values", "_vision_config"
"""How the parameter of another tower ends, and its config."""
_IMAGE_SIZES = "image_sizes"
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
        if _IMAGE_SIZES in self.asked.parameters:
            small = [image.small(self.asked.seed)] if image.height * image.width > _LARGE_IMAGE else []
            for each in (*small, image):
                sizes = {_IMAGE_SIZES: torch.tensor([[each.height, each.width]] * self.asked.batch)}
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


# Sounds to call a model with, in the forms in which models take them: spectra, or samples.

_SOUND_MASKS = ("input_features_mask", "feature_attention_mask", "audio_attention_mask", "padding_mask")
_MEL_BINS = (
    "num_mel_bins",
    "feature_size",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_size",
    "input_dim",
)
_SAMPLES = "chunk_sample_lengths"
"""Name of the parameter that says of how many samples a spectrum was made."""
_FEATURES = "audio_embed_sizes"
"""Name of the parameter that says how many features there are of a spectrum."""
_STRIDES = ("conv_stride", "downsampling_ratios")
"""Under which configs say how many samples each convolution makes one."""
_SECOND = 16_000
"""Samples of a sound."""


@dataclass(frozen=True, slots=True)
class SoundForms:
    """Makes the forms of one model's sounds, likelier ones first."""

    asked: Asked

    def sounds(self) -> Iterator[dict[str, Tensor]]:
        for name in (n for n in SOUNDS if n in self.asked.parameters):
            yield from self._samples(name) if name == "input_values" else self._spectra(name)

    def _samples(self, name: str) -> Iterator[dict[str, Tensor]]:
        """As few samples as may do, without and with a channel; a spectrum; a second of samples."""
        samples = _num_samples(self.asked.config, self.asked.seed)
        yield {name: self.asked.random(self.asked.batch, samples), **self._masks(samples)}
        yield {name: self.asked.random(self.asked.batch, 1, samples), **self._masks(samples)}
        longest = first_int(self.asked.config, ("max_length",))
        for bins in all_ints(self.asked.config, _MEL_BINS)[:1] if longest else ():
            yield {name: self.asked.random(self.asked.batch, longest, bins)}
        yield {name: self.asked.random(self.asked.batch, _SECOND - 1000 * bool(self.asked.seed))}

    def _spectra(self, name: str) -> Iterator[dict[str, Tensor]]:
        frames = _num_frames(self.asked.config, self.asked.seed)
        masks = self._masks(frames) | self._counts(frames)
        choosing = {n: mask.bool() if n in _SOUND_MASKS else mask for n, mask in masks.items()}
        for bins in sorted(all_ints(self.asked.config, _MEL_BINS), key=lambda n: n not in self.asked.sizes):
            shapes = (self.asked.batch, bins, frames), (self.asked.batch, frames, bins)
            yield from ({name: self.asked.random(*shape), **masks} for shape in shapes)
            yield from ({name: self.asked.random(*shape), **choosing} for shape in shapes if masks)
            yield from ({name: self.asked.random(*shape)} for shape in shapes if masks)

    def _counts(self, frames: int) -> dict[str, Tensor]:
        """Of how many samples a spectrum was made, how many features it has, int64 ``[B]``, by parameter."""
        hop = first_int(self.asked.config, ("hop_length",))
        lengths = torch.full((self.asked.batch,), frames * hop)
        found = {_SAMPLES: lengths} if hop and _SAMPLES in self.asked.parameters else {}
        if _FEATURES in self.asked.parameters:
            count = -(-frames // (first_int(self.asked.config, ("time_reduction",)) or 1))
            found[_FEATURES] = torch.full((self.asked.batch,), count)
        return found

    def _masks(self, length: int) -> dict[str, Tensor]:
        names = [n for n in self.asked.parameters if n in _SOUND_MASKS]
        return {n: torch.ones(self.asked.batch, length, dtype=torch.long) for n in names}


def _num_frames(config: Any, seed: int) -> int:
    """Frames of a spectrum: as many as positions demand, or as windows divide, or any."""
    positions = first_int(config, ("max_source_positions",))
    window = first_int(config, ("n_window",))
    if positions:
        return 2 * positions
    return 2 * window * (2 - bool(seed)) if window else 104 - 16 * bool(seed)


def _num_samples(config: Any, seed: int) -> int:
    names = [(node, name) for node in nodes(config) for name in _STRIDES if has(node, name)]
    strides = next((v for node, name in names if (v := getattr(node, name))), ())
    step = math.prod(strides) if isinstance(strides, (tuple, list)) else 16
    return step * (23 - 4 * bool(seed)) + step // 4 + 80


# Entities that a text mentions, to call a model with: their ids, and where in the text they are.

_POSITIONS = "entity_position_ids"
_NUM_ENTITIES = 6
_LONGEST_MENTION = 5
"""Of which the config does not say it."""


def entities(asked: Asked) -> Iterator[dict[str, Tensor]]:
    """Ids ``[B, E]``, and the positions ``[B, E, M]`` of their mentions, which end with -1."""
    name = asked.first(ENTITIES)
    count = _NUM_ENTITIES - bool(asked.seed)
    generator = torch.Generator().manual_seed(asked.seed)
    rows = first_int(asked.config, ("entity_vocab_size",)) or min(asked.sizes)
    ids = torch.randint(min(3, rows - 1), rows, (asked.batch, count), generator=generator)
    length = first_int(asked.config, ("max_mention_length",)) or _LONGEST_MENTION
    mentions = torch.full((asked.batch, count, length), -1)
    mentions[..., :2] = torch.arange(2 * count).view(count, 2)[:, : mentions.shape[2]]
    yield {name: ids, _POSITIONS: mentions} if _POSITIONS in asked.parameters else {name: ids}


# Images in crops to call a model with: the image made small, and the parts that it is cut into.

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


_SEEN_IMAGES = ("image_attention_mask",)
"""Names of the parameter that says which images a token sees."""
_NUM_STATES = 11
_NUM_STEPS = 64
"""Of a series of which the config does not say it."""


@dataclass(frozen=True, slots=True)
class FormMaker:
    """Makes the forms of one model's inputs."""

    asked: Asked

    def kinds(self) -> list[str]:
        """The kinds of input, beside tokens, that the model may be given."""
        names = {"image": IMAGES, "audio": SOUNDS, "series": SERIES, "entities": ENTITIES}
        kinds = [kind for kind, known in names.items() if self.asked.first(known)]
        if PATCHES_WITH_GRID in self.asked.parameters and self.asked.first(GRIDS):
            kinds.append("image")
        has_frames = not self.asked.first(PLACES)  # frames of pixels, rather than patches as of images
        if self.asked.first(VIDEOS) and (has_frames or "image" not in kinds):
            kinds.append("video")
        return kinds + (["states"] if self._takes_states() else [])

    def forms(self, kind: str) -> Iterator[InputForm]:
        """The forms of one kind, likelier ones first; images are ``[B, C, H, W]`` or lists of patches."""
        makers = {
            "image": lambda: chain(crops(self.asked), ImageForms(self.asked).images()),
            "video": ImageForms(self.asked).videos,
            "audio": SoundForms(self.asked).sounds,
            "series": self._series,
            "entities": lambda: entities(self.asked),
            "states": self._states,
        }
        for tensors in makers[kind]():
            seen = self._seen(tensors) if kind == "image" else {}
            if not any(name in SEEN_TILES for name in seen):
                yield InputForm(kind, tensors)
            if seen:
                yield InputForm(kind, tensors, seen)

    def resized(self, form: InputForm, sizes: Sequence[int]) -> Iterator[InputForm]:
        """The same with images ``[B, C, H, W]`` of other numbers of patches.

        Args:
            form: of images.
            sizes: the number of patches that they have, and those that they may have.
        """
        image = ImageSizes.of(self.asked.config)
        name, pixels = next(iter(form.tensors.items()))
        if form.kind != "image" or pixels.dim() != 4:
            return
        count = math.prod(n // p for n, p in zip(pixels.shape[-2:], image.patch, strict=True))
        sides = [math.isqrt(n) for n in sizes if n != count and math.isqrt(n) ** 2 == n > 1]
        for side in sides if count in sizes else ():
            other = self.asked.random(*pixels.shape[:2], side * image.patch[0], side * image.patch[1])
            yield InputForm(form.kind, {**form.tensors, name: other}, form.seen)

    def _seen(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """The parameters that say which of images ``[B, *dims, C, H, W]`` a token sees, and the dims."""
        dims = tuple(next(iter(tensors.values())).shape[1:-3])
        names = {1: _SEEN_IMAGES, 2: SEEN_TILES}.get(len(dims), ())
        return {name: dims for name in names if name in self.asked.parameters}

    # Measurements over time ---------------------------------------------------------------------

    def _series(self) -> Iterator[dict[str, Tensor]]:
        """As many steps as the config says, of several channels ``[B, T, C]`` or of one ``[B, T]``."""
        name = self.asked.first(SERIES)
        steps = first_int(self.asked.config, ("context_length",)) or _NUM_STEPS
        channels = first_int(self.asked.config, ("num_input_channels",))
        if channels:
            yield {name: self.asked.random(self.asked.batch, steps, channels)}
        yield {name: self.asked.random(self.asked.batch, steps)}

    # States of an encoder -----------------------------------------------------------------------

    def _takes_states(self) -> bool:
        if not self.asked.first(STATES) or "decoder_input_ids" in self.asked.parameters:
            return False
        flags = ("is_decoder", "add_cross_attention", "cross_attention_layers")
        return self.asked.offers_states or any(getattr(self.asked.config, flag, None) for flag in flags)

    def _states(self) -> Iterator[dict[str, Tensor]]:
        asked = self.asked
        names = ("cross_attention_hidden_size", "encoder_hidden_size", "hidden_size")
        widths = [getattr(asked.config, n, None) for n in names]
        for width in dict.fromkeys(w for w in widths if isinstance(w, int) and w > 0):
            length = _NUM_STATES - 2 * bool(asked.seed)
            yield {asked.first(STATES): asked.random(asked.batch, length, width)}
