"""What the inputs beside tokens are called, and what is known when one of them is made up."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# Combinations of things that are made when they are asked for first.

_T = TypeVar("_T")


class Once(Iterable[_T]):
    """What an iterator yields, as often as it is asked for; each is made once, and none before its turn."""

    def __init__(self, source: Iterator[_T]) -> None:
        self._source = source
        self._made: list[_T] = []

    def __iter__(self) -> Iterator[_T]:
        for index in itertools.count():
            if index == len(self._made):
                self._made += itertools.islice(self._source, 1)
            if index == len(self._made):
                return
            yield self._made[index]


def combined(each: Sequence[Once[_T]]) -> Iterator[tuple[_T, ...]]:
    """One of each, in the order of ``itertools.product``, which would make all of them first."""
    if not each:
        yield ()
        return
    for first in each[0]:
        yield from ((first, *others) for others in combined(each[1:]))


# A batch and a length that coincide with no size in a model.

_LENGTHS = (24, 26, 22, 21, 27, 19, 17, 23, 29, 15, 13, 11, 14, 10, 9)
"""Of the sequence, the best first."""


_SHORTER = 5
"""Positions that a decoder has fewer."""


def free_sizes(model: nn.Module, multiple: int, tokens: int = 0) -> tuple[int, int]:
    """Batch and sequence length: neither their product nor one of them is the size of a parameter's dim.

    If possible, the length is a multiple of a number, and no number in the model's code either: not twice the
    size of a buffer (rotary frequencies), and no int attribute.

    Args:
        model: with parameters and buffers.
        multiple: of which the length is one.
        tokens: of which a batch has at least as many, as has that of a decoder.
    """
    taken = {n for p in model.parameters() for n in p.shape}
    others = _numbers_of(model)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int) or longest <= 0:
        longest = 1 << 20
    multiples = [n for n in (*_LENGTHS, *range(multiple, 10 * multiple, multiple)) if not n % multiple]
    for candidates, avoided in itertools.product((multiples, _LENGTHS), (others, set[int]())):
        for length in (n for n in candidates if n >= min(_LENGTHS)):
            lengths = {length, length - _SHORTER}
            fewest = -(-tokens // (length - _SHORTER))
            for batch in (max(n, fewest + n - 3) for n in (3, 5, 7)):
                if length < longest and not taken & {*lengths, batch, length * batch} | avoided & lengths:
                    return batch, length
    return 3, min(24, int(longest) - 1)


def _numbers_of(model: nn.Module) -> set[int]:
    """Sizes that tensors may get in the forward pass, beside those of parameters.

    Attributes that differ between modules of a class count layers, or are sizes of parameters.
    """
    sizes = {n for b in model.buffers() for n in b.shape}
    values: dict[tuple[type, str], set[int]] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is int:
                values.setdefault((type(module), name), set()).add(value)
    attributes = {n for found in values.values() if len(found) == 1 for n in found}
    return sizes | {2 * n for n in sizes} | attributes


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
