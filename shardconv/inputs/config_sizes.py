"""Sizes in a config, under names that many configs use, and configs with smaller ones."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any


def nodes(config: Any) -> list[Any]:
    """A config and those in it, outer ones first."""
    out = [config]
    for node in out:
        values = vars(node).values() if hasattr(node, "__dict__") else ()
        out += [v for v in values if hasattr(v, "to_dict") and hasattr(v, "model_type")]
    return out


def first_int(config: Any, names: Collection[str]) -> int:
    """The first positive int under one of the names, outer configs and earlier names first; else 0."""
    return next(iter(all_ints(config, names)), 0)


def all_ints(config: Any, names: Collection[str]) -> list[int]:
    """The positive ints under these names, each once, outer configs and earlier names first."""
    found = (int_of(n, name) for n in nodes(config) for name in names)
    return list(dict.fromkeys(value for value in found if value > 0))


def has(node: Any, name: str) -> bool:
    """Whether a config says anything under a name."""
    return getattr(node, name, None) is not None


def int_of(node: Any, name: str) -> int:
    """The int of a config under a name; 0 if there is none."""
    value = getattr(node, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def pair(value: Any) -> tuple[int, int] | None:
    """Both sides of what is said as one int or as two."""
    if isinstance(value, int) and value > 0:
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(v, int) for v in value):
        return int(value[0]), int(value[1])
    return None


# The sizes of images and of their patches, as a config has them.

_MERGES = (
    "spatial_merge_size",
    "merge_size",
    "pooling_kernel_size",
    "downsample_factor",
    "adapter_merge_size",
    "scale_factor",
    "pixel_shuffle_factor",
)
_SIDE = 64
"""Of an image of which the config says nothing: networks of convolutions make it smaller, to a 32nd."""


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """What a config says of images; plausible numbers for what it does not say."""

    channels: int
    height: int
    width: int
    patch: tuple[int, int]
    patch_frames: int
    """Of a patch in time."""
    frames: int
    """Of a video; 0 if the config does not tell."""
    is_known: bool
    """Whether the config tells the height and the width."""
    merge: int
    """Into how many sides of patches the model divides rows and columns."""

    @classmethod
    def of(cls, config: Any) -> ImageSizes:
        """The sizes in the first part of a config that knows some."""
        node = next((n for n in nodes(config) if has(n, "patch_size") or has(n, "image_size")), config)
        patch = pair(getattr(node, "patch_size", None)) or (1, 1)
        said = pair(getattr(node, "image_size", None))
        size = said or _unsaid(patch)
        merges = [m for n in nodes(config) for name in _MERGES if (m := int_of(n, name)) > 1]
        return cls(
            channels=first_int(node, ("num_channels", "in_channels", "in_chans")) or 3,
            height=size[0],
            width=size[1],
            patch=patch,
            patch_frames=first_int(node, ("temporal_patch_size", "patch_temporal")) or 1,
            frames=first_int(node, ("num_frames",)),
            is_known=said is not None,
            merge=max(merges, default=2),
        )

    @property
    def patch_numel(self) -> int:
        """Numbers in a patch of one frame."""
        return self.channels * self.patch[0] * self.patch[1]

    def divided(self) -> ImageSizes:
        """An image that is a little smaller, if the patches of this one cannot be merged without a rest."""
        steps = self.patch[0] * self.merge, self.patch[1] * self.merge
        height, width = self.height - self.height % steps[0], self.width - self.width % steps[1]
        return replace(self, height=height, width=width) if height and width else self

    def small(self, seed: int) -> ImageSizes:
        """An image of few patches."""
        rows, columns = self.grid(seed)
        return replace(self, height=rows * self.patch[0], width=columns * self.patch[1])

    def grid(self, seed: int) -> tuple[int, int]:
        """Rows and columns of patches; others for another seed."""
        return 2 * self.merge, (3 - bool(seed)) * self.merge


def _unsaid(patch: tuple[int, int]) -> tuple[int, int]:
    """Height and width where the config does not say them."""
    return (_SIDE, _SIDE) if patch == (1, 1) else (4 * patch[0], 4 * patch[1])


# Copies of a config with smaller sizes of what a model sees: images, sounds, chunks of a text.
#
# None of these is a size of a matrix, but all decide how many activations a call has. A grid of patches
# that is smaller by some factor makes the other numbers smaller that follow from it: those of its patches,
# of the tokens that they are merged to, and of the images that a large one is divided into.

_SIDES, _PATCH = ("image_size", "resolution"), "patch_size"
_FOLLOWING = re.compile(
    r"image|pixel|patch|position|resolution|pinpoint|crop|tokens_per|num_tokens|seq_length"
)
"""In names of numbers that may follow from the size of an image."""
_OTHERS = re.compile(rf"{_PATCH}$|_ids?$|_index$|_token$|_dim$|channels|layers?$|heads?$|std|eps")
"""In names of numbers that do not."""
_OF_TEXTS = "max_position_embeddings"
_SOUND_POSITIONS = "max_source_positions"
_SOUND_WINDOWS = re.compile(r"n_window(_|$)")
_LEAST_WINDOW = 5
"""Convolutions halve what is in one, up to three times."""
_CHUNKS = re.compile(r"(^|_)(chunk_size|block_size|attention_window)$")
_LEAST_PATCHES = 4
"""In a row of a grid."""
_USUAL_PATCHES = 6
_STRIDE = 32
"""Pixels in a row of the last grid of a tower without patches, which halves its images five times."""
_FEW_STRIDES = 3
_POSITIONS = 48
"""Of a sound."""
_CHUNK_SIZES, _LARGEST_CHUNK = (32, 64), 1024
"""A text of a trace is padded to one chunk of a scan, block or window with these as with larger ones: short
texts with the first, those in which sounds or images are with the second. Of still larger ones, code makes
masks alone."""
_MOST_GRIDS = 3

Change = Callable[[Any], None]
"""Of a config, in place."""


def smaller_configs(config: Any) -> Iterator[Any]:
    """Copies with smaller sizes: of all that can be smaller, then of each kind alone."""
    images = _grids(config)
    sounds: list[Change] = [_fewer_sound_positions] if _does(_fewer_sound_positions, config) else []
    chunks = [change for change in map(_chunks_of, _CHUNK_SIZES) if _does(change, config)]
    for chunk in [[chunk] for chunk in chunks] or [[]]:
        for grid in [[grid] for grid in images] or [[]]:
            if grid or sounds or chunk:
                yield _changed(config, [*grid, *sounds, *chunk])
    one_of_each = [*images[:1], *sounds, *chunks[:1]]
    if len(one_of_each) > 1:
        for change in one_of_each:
            yield _changed(config, [change])


def _changed(config: Any, changes: list[Change]) -> Any:
    other = copy.deepcopy(config)
    for change in changes:
        change(other)
    return other


def _does(change: Change, config: Any) -> bool:
    """Whether a change of a config makes another one of it."""
    return bool(_changed(config, [change]).to_dict() != config.to_dict())


# Images -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tower:
    """Images of one tower, and the smaller ones."""

    side: int
    small_side: int
    row: int
    """Patches."""
    small_row: int

    def smaller(self, number: int) -> int:
        """A number that follows from the size of images, as it is with the smaller ones; any other stays."""
        times, rest = divmod(number, self.side)
        if times and not rest:
            return times * self.small_side
        for more in (0, 1):  # a token for the whole image
            merged = math.isqrt(number - more)
            if merged * merged + more == number and merged > 1 and self.row % merged == 0:
                small, rest = divmod(self.small_row * merged, self.row)
                if small and not rest:
                    return small * small + more
        return number


def _grids(config: Any) -> list[Change]:
    """Changes to smaller grids of patches, of all towers together."""
    towers = {}
    for node in nodes(config):
        side = next((pair(getattr(node, name)) for name in _SIDES if has(node, name)), None)
        patch = pair(getattr(node, _PATCH, _STRIDE))
        if (
            side
            and patch
            and side[0] == side[1]
            and patch[0] == patch[1]
            and side[0] // patch[0] > _LEAST_PATCHES
        ):
            row = side[0] // patch[0]
            rows = _smaller_rows(row) if has(node, _PATCH) else [_FEW_STRIDES]
            towers[side[0]] = [
                _Tower(side[0], small * patch[0] + side[0] % patch[0], row, small) for small in rows
            ]
    choices = itertools.zip_longest(*towers.values())
    filled = (
        [each or options[-1] for each, options in zip(choice, towers.values(), strict=True)]
        for choice in choices
    )
    return [_Fewer(tuple(chosen)).apply for chosen in itertools.islice(filled, _MOST_GRIDS) if chosen]


def _smaller_rows(row: int) -> list[int]:
    """Lengths of a row of fewer patches: those that divide it, not much fewer than usual ones first."""
    shorter = range(_LEAST_PATCHES, row // 2 + 1)
    found = sorted((n for n in shorter if row % n == 0), key=lambda n: (n < _USUAL_PATCHES, n))
    return found or [min(2 * _LEAST_PATCHES, row // 2)]


@dataclass(frozen=True, slots=True)
class _Fewer:
    """Smaller images of all towers."""

    towers: tuple[_Tower, ...]

    def apply(self, config: Any) -> None:
        """Change all numbers of a config that follow from the size of its images, in place."""
        for node in nodes(config):
            for name, value in list(vars(node).items()):
                if not _FOLLOWING.search(name) or _OTHERS.search(name):
                    continue
                if name != _OF_TEXTS or has(node, _SIDES[0]):
                    setattr(node, name, self._smaller(value))

    def _smaller(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._smaller, value))
        if isinstance(value, dict):
            return {self._smaller(k): self._smaller(v) for k, v in value.items()}
        if type(value) is not int:
            return value
        return next((n for n in (tower.smaller(value) for tower in self.towers) if n != value), value)


# Others -----------------------------------------------------------------------------------------


def _fewer_sound_positions(config: Any) -> None:
    """Shorter sounds, of as many windows where a tower divides them."""
    for node in nodes(config):
        positions = int_of(node, _SOUND_POSITIONS)
        if positions < 2 * _POSITIONS:
            continue
        names = [name for name in vars(node) if _SOUND_WINDOWS.match(name) and int_of(node, name)]
        windows = [int_of(node, name) for name in names]
        factors = range(1, positions // _POSITIONS + 1)
        factor = max(
            (f for f in factors if all(n % f == 0 and n // f >= _LEAST_WINDOW for n in windows)), default=1
        )
        for name in (_SOUND_POSITIONS, *names):
            setattr(node, name, int_of(node, name) // factor)


def _chunks_of(size: int) -> Change:
    def change(config: Any) -> None:
        for node in nodes(config):
            for name in [name for name in vars(node) if _CHUNKS.search(name)]:
                setattr(node, name, _smaller_chunk(getattr(node, name), size))

    return change


def _smaller_chunk(value: Any, size: int) -> Any:
    """One size, or that of each layer."""
    if isinstance(value, list):
        return [_smaller_chunk(each, size) for each in value]
    return size if type(value) is int and size < value <= _LARGEST_CHUNK else value
