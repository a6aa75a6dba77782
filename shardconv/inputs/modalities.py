"""Make the inputs other than tokens to call a model with: images, sounds, measurements, states of an encoder.

The parameters of a forward method have descriptive names, and the config has sizes. The right form is not
certain, so forms are tried in order (``trace_inputs.py``).

The richest forms come first: images and audio together, each of them separately, then none. There are several
forms of images: tiles with their sizes or ratios, patches with their positions, one image per row, frames of
a video, lists of images. Audio is tried with few samples and with a second of them. Forms with more
descriptive parameters come first. If the error of the model names a size (a number of features, the length of
a mask, a divisor, a width), it is tried at once. A required input of which nothing is known gets the width
that the first matrix product with it needs. An input that the forward pass does not read does not count as
given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from .config_sizes import ImageSizes, all_ints, first_int, has, nodes
from .image_forms import GRIDS, IMAGE_SIZES, PATCHES_WITH_GRID, PLACES, SEEN_TILES, ImageForms
from .input_forms import ENTITIES, IMAGES, SERIES, SOUNDS, STATES, VIDEOS, Asked, InputForm

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
"""Name of the parameter with the number of samples of a spectrum."""
_FEATURES = "audio_embed_sizes"
"""Name of the parameter with the number of features of a spectrum."""
_STRIDES = ("conv_stride", "downsampling_ratios")
"""Names of the strides of convolutions over samples in configs."""
_SECOND = 16_000
"""Samples of a second of sound."""


@dataclass(frozen=True, slots=True)
class SoundForms:
    """Make the forms of one model's sounds, likelier ones first."""

    asked: Asked

    def sounds(self) -> Iterator[dict[str, Tensor]]:
        """Yield spectra or samples."""
        for name in (n for n in SOUNDS if n in self.asked.parameters):
            yield from self._samples(name) if name == "input_values" else self._spectra(name)

    def _samples(self, name: str) -> Iterator[dict[str, Tensor]]:
        """Yield few samples without and with a channel, a spectrum, and a second of samples."""
        names = [
            (node, stride) for node in nodes(self.asked.config) for stride in _STRIDES if has(node, stride)
        ]
        strides = next((v for node, stride in names if (v := getattr(node, stride))), ())
        step = math.prod(strides) if isinstance(strides, (tuple, list)) else 16
        samples = step * (23 - 4 * bool(self.asked.seed)) + step // 4 + 80
        yield {name: self.asked.random(self.asked.batch, samples), **self._masks(samples)}
        yield {name: self.asked.random(self.asked.batch, 1, samples), **self._masks(samples)}
        longest = first_int(self.asked.config, ("max_length",))
        for bins in all_ints(self.asked.config, _MEL_BINS)[:1] if longest else ():
            yield {name: self.asked.random(self.asked.batch, longest, bins)}
        yield {name: self.asked.random(self.asked.batch, _SECOND - 1000 * bool(self.asked.seed))}

    def _spectra(self, name: str) -> Iterator[dict[str, Tensor]]:
        config, is_first = self.asked.config, not self.asked.seed
        window, hop = first_int(config, ("n_window",)), first_int(config, ("hop_length",))
        frames = 104 if is_first else 88
        if positions := first_int(config, ("max_source_positions",)):
            frames = 2 * positions
        elif window:
            frames = (4 if is_first else 2) * window
        masks = self._masks(frames)
        if hop and _SAMPLES in self.asked.parameters:
            masks[_SAMPLES] = torch.full((self.asked.batch,), frames * hop)
        if _FEATURES in self.asked.parameters:
            count = -(-frames // (first_int(config, ("time_reduction",)) or 1))
            masks[_FEATURES] = torch.full((self.asked.batch,), count)
        choosing = {n: mask.bool() if n in _SOUND_MASKS else mask for n, mask in masks.items()}
        for bins in sorted(all_ints(self.asked.config, _MEL_BINS), key=lambda n: n not in self.asked.sizes):
            shapes = (self.asked.batch, bins, frames), (self.asked.batch, frames, bins)
            yield from ({name: self.asked.random(*shape), **masks} for shape in shapes)
            yield from ({name: self.asked.random(*shape), **choosing} for shape in shapes if masks)
            yield from ({name: self.asked.random(*shape)} for shape in shapes if masks)

    def _masks(self, length: int) -> dict[str, Tensor]:
        names = [n for n in self.asked.parameters if n in _SOUND_MASKS]
        return {n: torch.ones(self.asked.batch, length, dtype=torch.long) for n in names}


_POSITIONS = "entity_position_ids"
_NUM_ENTITIES = 6
_LONGEST_MENTION = 5
"""Longest mention of an entity if the config has no number."""


def entities(asked: Asked) -> Iterator[dict[str, Tensor]]:
    """Yield ids ``[B, E]`` of entities that a text mentions, and positions ``[B, E, M]``, which end with
    -1."""
    name = asked.first(ENTITIES)
    count = _NUM_ENTITIES - bool(asked.seed)
    generator = torch.Generator().manual_seed(asked.seed)
    rows = first_int(asked.config, ("entity_vocab_size",)) or min(asked.sizes)
    ids = torch.randint(min(3, rows - 1), rows, (asked.batch, count), generator=generator)
    length = first_int(asked.config, ("max_mention_length",)) or _LONGEST_MENTION
    mentions = torch.full((asked.batch, count, length), -1)
    mentions[..., :2] = torch.arange(2 * count).view(count, 2)[:, : mentions.shape[2]]
    yield {name: ids, _POSITIONS: mentions} if _POSITIONS in asked.parameters else {name: ids}


_MASK = "image_attention_mask"
"""Names of the parameters with the size of an image, and with a mask of the patches of a crop that are part
of it."""
_NUM_CROPS = 2


def crops(asked: Asked) -> Iterator[dict[str, Tensor]]:
    """Yield a small image with its crops ``[B, 1 + N, C, H, W]``, if the config has the side of a crop."""
    side = first_int(asked.config, ("crop_size",))
    if not side or IMAGE_SIZES not in asked.parameters or _MASK not in asked.parameters:
        return
    image = ImageSizes.of(asked.config)
    shape = asked.batch, 1 + _NUM_CROPS
    yield {
        asked.first(IMAGES): asked.random(*shape, image.channels, side, side),
        IMAGE_SIZES: torch.tensor([[side, _NUM_CROPS * side]] * asked.batch),
        _MASK: torch.ones(*shape, side // image.patch[0], side // image.patch[1], dtype=torch.long),
    }


_SEEN_IMAGES = ("image_attention_mask",)
"""Names of the parameter with the images that a token sees."""
_NUM_STATES = 11
_NUM_STEPS = 64
"""Steps of a series if the config has no number."""


@dataclass(frozen=True, slots=True)
class FormMaker:
    """Make the forms of one model's inputs."""

    asked: Asked

    def kinds(self) -> list[str]:
        """Return the kinds of input other than tokens that the model may take."""
        names = {"image": IMAGES, "audio": SOUNDS, "series": SERIES, "entities": ENTITIES}
        kinds = [kind for kind, argument_names in names.items() if self.asked.first(argument_names)]
        if PATCHES_WITH_GRID in self.asked.parameters and self.asked.first(GRIDS):
            kinds.append("image")
        has_frames = not self.asked.first(PLACES)  # frames of pixels instead of patches
        if self.asked.first(VIDEOS) and (has_frames or "image" not in kinds):
            kinds.append("video")
        if self.asked.first(STATES) and "decoder_input_ids" not in self.asked.parameters:
            flags = ("is_decoder", "add_cross_attention", "cross_attention_layers")
            if self.asked.offers_states or any(getattr(self.asked.config, flag, None) for flag in flags):
                kinds.append("states")
        return kinds

    def forms(self, kind: str) -> Iterator[InputForm]:
        """Yield the forms of one kind, likelier ones first. Images are ``[B, C, H, W]`` or lists of
        patches."""
        makers = {
            "image": lambda: chain(crops(self.asked), ImageForms(self.asked).images()),
            "video": ImageForms(self.asked).videos,
            "audio": SoundForms(self.asked).sounds,
            "series": self._series,
            "entities": lambda: entities(self.asked),
            "states": self._states,
        }
        for tensors in makers[kind]():
            seen: dict[str, tuple[int, ...]] = {}
            if kind == "image":  # parameters with the images ``[B, *dims, C, H, W]`` that a token sees
                dims = tuple(next(iter(tensors.values())).shape[1:-3])
                names = {1: _SEEN_IMAGES, 2: SEEN_TILES}.get(len(dims), ())
                seen = {name: dims for name in names if name in self.asked.parameters}
            if not any(name in SEEN_TILES for name in seen):
                yield InputForm(kind, tensors)
            if seen:
                yield InputForm(kind, tensors, seen)

    def resized(self, form: InputForm, sizes: Sequence[int]) -> Iterator[InputForm]:
        """Yield the form with images ``[B, C, H, W]`` with other numbers of patches."""
        image = ImageSizes.of(self.asked.config)
        name, pixels = next(iter(form.tensors.items()))
        if form.kind != "image" or pixels.dim() != 4:
            return
        count = math.prod(n // p for n, p in zip(pixels.shape[-2:], image.patch, strict=True))
        sides = [math.isqrt(n) for n in sizes if n != count and math.isqrt(n) ** 2 == n > 1]
        for side in sides if count in sizes else ():
            other = self.asked.random(*pixels.shape[:2], side * image.patch[0], side * image.patch[1])
            yield InputForm(form.kind, {**form.tensors, name: other}, form.seen)

    def _series(self) -> Iterator[dict[str, Tensor]]:
        """Yield measurements of several channels ``[B, T, C]``, or of one ``[B, T]``."""
        name = self.asked.first(SERIES)
        steps = first_int(self.asked.config, ("context_length",)) or _NUM_STEPS
        channels = first_int(self.asked.config, ("num_input_channels",))
        if channels:
            yield {name: self.asked.random(self.asked.batch, steps, channels)}
        yield {name: self.asked.random(self.asked.batch, steps)}

    def _states(self) -> Iterator[dict[str, Tensor]]:
        """Yield states of an encoder."""
        asked = self.asked
        names = ("cross_attention_hidden_size", "encoder_hidden_size", "hidden_size")
        widths = [getattr(asked.config, n, None) for n in names]
        for width in dict.fromkeys(w for w in widths if isinstance(w, int) and w > 0):
            length = _NUM_STATES - 2 * bool(asked.seed)
            yield {asked.first(STATES): asked.random(asked.batch, length, width)}
