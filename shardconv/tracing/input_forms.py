"""What the inputs beside tokens are called, and what is known when one of them is made up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

IMAGES = ("pixel_values", "image_pixel_values", "flattened_patches")
"""Names of the parameter that takes images."""
VIDEOS = ("pixel_values_videos",)
"""Names of the parameter that takes videos; they are made up where no images are taken."""
SOUNDS = ("input_features", "audio_input_features", "input_values")
"""Names of the parameter that takes sounds: spectra, or samples."""
SERIES = ("past_values",)
"""Names of the parameter that takes measurements over time."""
ENTITIES = ("entity_ids",)
"""Names of the parameter that takes ids of what a text mentions."""
FORMED = (*IMAGES, *VIDEOS, *SOUNDS, *SERIES, *ENTITIES)
"""Names of the parameters that are given in forms, where they are required."""
NAMES = {
    "image": (*IMAGES, *VIDEOS),
    "video": VIDEOS,
    "audio": SOUNDS,
    "series": SERIES,
    "entities": ENTITIES,
}
"""Kind of input -> names of the parameters that take it."""
STATES = ("encoder_hidden_states", "cross_attention_states", "encoder_outputs")
"""Names of the parameter that takes the states of an encoder."""


@dataclass(frozen=True, slots=True)
class InputForm:
    """One way of giving a model one kind of input."""

    kind: str
    """``image``, ``video``, ``audio``, ``series``, ``entities`` or ``states``."""
    tensors: dict[str, Tensor]
    """By parameter; the batch is the first dim, or a factor of it."""
    seen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameters that say which images of a row a token sees, ``[B, S, *dims]``: dims of the images."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The call of a model whose inputs are made up."""

    parameters: Collection[str]
    """Names of the forward method's parameters."""
    config: Any
    dtype: torch.dtype
    batch: int
    seed: int
    sizes: Collection[int] = ()
    """Of the model's parameters: likely numbers of bins."""
    offers_states: bool = False
    """States of an encoder are given even if the config does not say that there is one."""

    def first(self, names: Collection[str]) -> str:
        """The first of some names that a parameter has; empty if none has one."""
        return next((n for n in names if n in self.parameters), "")

    def random(self, *shape: int) -> Tensor:
        """Numbers of the model's dtype, others for another seed."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(shape, generator=generator).to(self.dtype)
