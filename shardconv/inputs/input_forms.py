"""Names of the inputs other than tokens, and the facts for making one of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_T = TypeVar("_T")


class Once(Iterable[_T]):
    """The items of an iterator, for any number of iterations. Each is made once, and only when it is
    needed."""

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
    """Yield combinations of one item of each, like ``itertools.product``, but without making all items
    first."""
    if not each:
        yield ()
        return
    for first in each[0]:
        yield from ((first, *others) for others in combined(each[1:]))


_LENGTHS = (24, 26, 22, 21, 27, 19, 17, 23, 29, 15, 13, 11, 14, 10, 9)
"""Lengths of the sequence, the best first."""


_SHORTER = 5
"""Number of positions by which a decoder's sequence is shorter."""


def free_sizes(model: nn.Module, multiple: int, tokens: int = 0) -> tuple[int, int]:
    """Return a batch and a sequence length that coincide with no size in a model.

    Neither of them, nor their product, is the size of a parameter's dim. If possible, the length is a
    multiple of ``multiple``, and differs from numbers in the model's code: twice the size of a buffer (rotary
    frequencies), and int attributes.

    Args:
        model: a model with parameters and buffers.
        multiple: the length is a multiple of it.
        tokens: fewest tokens in a batch, also of a decoder.
    """
    taken = {n for p in model.parameters() for n in p.shape}
    # Sizes that tensors may get in the forward pass: sizes of buffers, and attributes. Attributes that differ
    # between modules of a class count layers, or are sizes of parameters.
    buffer_sizes = {n for b in model.buffers() for n in b.shape}
    values: dict[tuple[type, str], set[int]] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is int:
                values.setdefault((type(module), name), set()).add(value)
    others = {n for found in values.values() if len(found) == 1 for n in found}
    others |= buffer_sizes | {2 * n for n in buffer_sizes}
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


IMAGES = ("pixel_values", "image_pixel_values", "flattened_patches")
"""Names of the parameter that takes images."""
VIDEOS = ("pixel_values_videos",)
"""Names of the parameter that takes videos. They are made if the model takes no images."""
SOUNDS = ("input_features", "audio_input_features", "input_values")
"""Names of the parameter that takes sounds: spectra, or samples."""
SERIES = ("past_values",)
"""Names of the parameter that takes measurements over time."""
ENTITIES = ("entity_ids",)
"""Names of the parameter that takes ids of entities that a text mentions."""
FORMED = (*IMAGES, *VIDEOS, *SOUNDS, *SERIES, *ENTITIES)
"""Names of the parameters that get forms if they are required."""
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
    """A way to give a model one kind of input."""

    kind: str
    """``image``, ``video``, ``audio``, ``series``, ``entities`` or ``states``."""
    tensors: dict[str, Tensor]
    """Tensors by parameter. The batch is the first dim, or a factor of it."""
    seen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameters with the images of a row that a token sees, ``[B, S, *dims]`` -> dims of the images."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The facts of a model for which inputs are made."""

    parameters: Collection[str]
    """Names of the forward method's parameters."""
    config: Any
    dtype: torch.dtype
    batch: int
    seed: int
    sizes: Collection[int] = ()
    """Sizes of the model's parameters, which are likely numbers of bins."""
    offers_states: bool = False
    """Give states of an encoder even if the config does not mention one."""

    def first(self, names: Collection[str]) -> str:
        """Return the first of the names that a parameter has; empty if there is none."""
        return next((n for n in names if n in self.parameters), "")

    def random(self, *shape: int) -> Tensor:
        """Return numbers of the model's dtype, which depend on the seed."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(shape, generator=generator).to(self.dtype)
