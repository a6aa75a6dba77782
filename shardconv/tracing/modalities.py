"""The inputs beside tokens to call a model with: images, sounds, measurements, states of an encoder.

The parameters of a forward method have telling names, and the config has sizes. Which of the forms is meant
cannot be read off with certainty: they are tried in order (``inputs.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from .config_sizes import first_int
from .crop_forms import crops
from .entity_forms import entities
from .image_forms import PATCHES_WITH_GRID, ImageForms
from .image_sizes import ImageSizes
from .input_forms import ENTITIES, IMAGES, SERIES, SOUNDS, STATES, VIDEOS, Asked, InputForm
from .patch_forms import GRIDS, PLACES
from .sound_forms import SoundForms
from .tile_forms import SEEN_TILES

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
