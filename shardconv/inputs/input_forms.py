"""Names of the inputs other than tokens, the facts for making one of them, and what errors say of them."""

from __future__ import annotations

import itertools
import re
import traceback
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
        yield from ((first, *rest) for rest in combined(each[1:]))


_LENGTHS = (24, 26, 22, 21, 27, 19, 17, 23, 29, 15, 13, 11, 14, 10, 9)
"""Lengths of the sequence, the best first."""


_SHORTER = 5
"""Number of positions by which a decoder's sequence is shorter."""


def free_sizes(model: nn.Module, multiple: int, tokens: int = 0) -> tuple[int, int]:
    """Return a batch and a sequence length that coincide with no size in a model.

    Neither of them, nor their product, is the size of a parameter's dim. If possible, the length is a
    multiple of ``multiple``, and differs from numbers in the model's code: twice the size of a buffer (rotary
    frequencies), and int attributes.
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
    single = {n for sizes in values.values() if len(sizes) == 1 for n in sizes}
    single |= buffer_sizes | {2 * n for n in buffer_sizes}
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int) or longest <= 0:
        longest = 1 << 20
    multiples = [n for n in (*_LENGTHS, *range(multiple, 10 * multiple, multiple)) if not n % multiple]
    for candidates, avoided in itertools.product((multiples, _LENGTHS), (single, set[int]())):
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


PATCH_MASK = "bool_masked_pos"
"""Name of the parameter with the patches that a model replaces by a learned one, ``[B, N]``."""


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


# Read from the errors of a traced forward pass which inputs the model needs.


_LONGEST = 4096
"""Larger numbers in errors are not tried as sizes."""
_WHERE = re.compile(r"^[\w.]*: ")
"""The module in which a trace failed, at the start of the message."""
_MASK = re.compile(r"shape of the mask \[([\d, ]+)\] at index \d+ does not match .* tensor \[([\d, ]+)\]")
_MULTIPLE = re.compile(r"multiple of (\d+)")
_PRODUCT = re.compile(r"shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x\d+\)")


def release(error: BaseException | None) -> None:
    """Free the objects in the frames of an error: tapes, and copies of modules with parameters."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None  # a cleared frame still holds its function and the closure
        error = error.__cause__ or error.__context__


def numbers(error: Exception) -> list[int]:
    """Return the numbers in an error that may be sizes, each once."""
    values = map(int, re.findall(r"\b\d+\b", str(error)))
    return [n for n in dict.fromkeys(values) if 0 < n < _LONGEST]


def is_about_tokens(error: Exception) -> bool:
    """Return whether an error is about the number of tokens."""
    said = _WHERE.sub("", str(error))
    return "token" in said and "has no attribute" not in said


def needed_count(error: Exception, count: int) -> int | None:
    """Return the number of features from an error that compares it with a number of tokens.

    Returns:
        None if the error is another one, or does not name exactly these two numbers.
    """
    said = {int(n) for n in re.findall(r"\b\d+\b", str(error))}
    if not is_about_tokens(error) or count not in said or len(said) != 2:
        return None
    return next(n for n in said if n != count)


def needed_multiple(error: Exception, tensors: Mapping[str, Tensor]) -> tuple[list[str], int] | None:
    """Return the inputs whose last dim must be a multiple of a number in the error, and this number.

    None if the error is another one, or the inputs are such multiples.
    """
    match = _MULTIPLE.search(str(error))
    multiple = int(match[1]) if match else 1
    lengths = {n for n in numbers(error) if n % multiple}
    names = [name for name, t in tensors.items() if t.dim() > 1 and t.shape[-1] in lengths]
    return (names, multiple) if names else None


def needed_mask(error: Exception, tensors: Mapping[str, Tensor]) -> tuple[str, int] | None:
    """Return the mask ``[B, N]`` that does not fit the tensor that it indexes, and the right N.

    None if the error is another one, or none of the tensors is that mask.
    """
    match = _MASK.search(str(error))
    if match is None:
        return None
    mask, indexed = ([int(n) for n in text.split(",")] for text in match.groups())
    names = (n for n, t in tensors.items() if t.dtype == torch.bool and list(t.shape) == mask)
    name = next(names, None)
    if name is None or len(mask) != 2 or len(indexed) < 2 or mask[0] != indexed[0]:
        return None
    return name, indexed[1]


def needed_width(error: Exception, tensors: Mapping[str, Tensor]) -> tuple[str, int] | None:
    """Return the input whose last dim a linear layer could not take, and the size that it needs.

    None if the error is another one, or its product is not of an unchanged input.
    """
    match = _PRODUCT.search(str(error))
    if match is None:
        return None
    rows, width, needed = map(int, match.groups())
    names = (
        name
        for name, t in tensors.items()
        if t.is_floating_point() and t.dim() and t.shape[-1] == width and t.numel() == rows * width
    )
    name = next(names, None)
    return None if name is None else (name, needed)
