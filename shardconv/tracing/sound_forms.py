"""Sounds to call a model with, in the forms in which models take them: spectra, or samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config_sizes import all_ints, first_int, has, nodes
from .input_forms import SOUNDS, Asked

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
