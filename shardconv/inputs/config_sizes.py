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
    """Return a config and its nested configs, outer ones first."""
    out = [config]
    for node in out:
        values = vars(node).values() if hasattr(node, "__dict__") else ()
        out += [v for v in values if hasattr(v, "to_dict") and hasattr(v, "model_type")]
    return out


def first_int(config: Any, names: Collection[str]) -> int:
    """Return the first positive int under one of the names (outer configs and earlier names first), or 0."""
    return next(iter(all_ints(config, names)), 0)


def all_ints(config: Any, names: Collection[str]) -> list[int]:
    """Return the positive ints under these names, each once, outer configs and earlier names first."""
    found = (int_of(n, name) for n in nodes(config) for name in names)
    return list(dict.fromkeys(value for value in found if value > 0))


def has(node: Any, name: str) -> bool:
    """Return whether a config has a value under a name."""
    return getattr(node, name, None) is not None


def int_of(node: Any, name: str) -> int:
    """Return the int of a config under a name; 0 if there is none."""
    value = getattr(node, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def pair(value: Any) -> tuple[int, int] | None:
    """Return both sides of a size that is written as one int or as two."""
    if isinstance(value, int) and value > 0:
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(v, int) for v in value):
        return int(value[0]), int(value[1])
    return None


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
"""Side of an image if the config has none. Convolutions make it smaller, down to a 32nd."""


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Sizes of images from a config, with plausible numbers if it has none."""

    channels: int
    height: int
    width: int
    patch: tuple[int, int]
    patch_frames: int
    """Frames of a patch."""
    frames: int
    """Frames of a video; 0 if the config has no number."""
    is_known: bool
    """Whether the config has a height and a width."""
    merge: int
    """Number of rows (and of columns) of patches that the model merges."""

    @classmethod
    def of(cls, config: Any) -> ImageSizes:
        """Return the sizes from the first part of a config that has some."""
        node = next((n for n in nodes(config) if has(n, "patch_size") or has(n, "image_size")), config)
        patch = pair(getattr(node, "patch_size", None)) or (1, 1)
        said = pair(getattr(node, "image_size", None))
        size = said or ((_SIDE, _SIDE) if patch == (1, 1) else (4 * patch[0], 4 * patch[1]))
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
        """Return the numbers in a patch of one frame."""
        return self.channels * self.patch[0] * self.patch[1]

    def divided(self) -> ImageSizes:
        """Return a slightly smaller image if the patches of this one cannot be merged without a rest."""
        steps = self.patch[0] * self.merge, self.patch[1] * self.merge
        height, width = self.height - self.height % steps[0], self.width - self.width % steps[1]
        return replace(self, height=height, width=width) if height and width else self

    def small(self, seed: int) -> ImageSizes:
        """Return an image of few patches."""
        rows, columns = self.grid(seed)
        return replace(self, height=rows * self.patch[0], width=columns * self.patch[1])

    def grid(self, seed: int) -> tuple[int, int]:
        """Return rows and columns of patches, which depend on the seed."""
        return 2 * self.merge, (3 - bool(seed)) * self.merge


# Copies of a config have smaller images, sounds, or chunks of a text.
#
# None of these is a size of a matrix, but all determine how many activations a call has. A smaller grid of
# patches makes the numbers smaller that depend on it: the number of patches, of merged tokens, and of the
# images that a large one is divided into.

_SIDES, _PATCH = ("image_size", "resolution"), "patch_size"
_FOLLOWING = re.compile(
    r"image|pixel|patch|position|resolution|pinpoint|crop|tokens_per|num_tokens|seq_length"
)
"""Part of names of numbers that may depend on the size of an image."""
_OTHERS = re.compile(rf"{_PATCH}$|_ids?$|_index$|_token$|_dim$|channels|layers?$|heads?$|std|eps")
"""Part of names of numbers that do not."""
_OF_TEXTS = "max_position_embeddings"
_SOUND_POSITIONS = "max_source_positions"
_SOUND_WINDOWS = re.compile(r"n_window(_|$)")
_LEAST_WINDOW = 5
"""Shortest window, since convolutions halve it up to three times."""
_CHUNKS = re.compile(r"(^|_)(chunk_size|block_size|attention_window)$")
_LEAST_PATCHES = 4
"""Fewest patches in a row of a grid."""
_USUAL_PATCHES = 6
_STRIDE = 32
"""Pixels in a row of the last grid of a tower without patches, which halves its images five times."""
_FEW_STRIDES = 3
_POSITIONS = 48
"""Positions of a short sound."""
_CHUNK_SIZES, _LARGEST_CHUNK = (32, 64), 1024
"""Sizes of chunks (of scans, blocks or windows) to which the text of a trace is padded: short texts fit in
the first, texts with sounds or images in the second. Larger chunks than ``_LARGEST_CHUNK`` are only used for
masks."""
_MOST_GRIDS = 3

Change = Callable[[Any], None]
"""Changes a config in place."""


def smaller_configs(config: Any) -> Iterator[Any]:
    """Yield copies with smaller sizes: first of everything that can be smaller, then of each kind
    separately."""
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
    """Return whether a change of a config has any effect."""
    return bool(_changed(config, [change]).to_dict() != config.to_dict())


# Images -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tower:
    """The images of one tower, and the smaller ones."""

    side: int
    small_side: int
    row: int
    """Patches in a row."""
    small_row: int

    def smaller(self, number: int) -> int:
        """Return a number with the smaller images if it depends on their size; otherwise the same number."""
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
    """Return changes to smaller grids of patches, of all towers together."""
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
            # Shorter rows divide the row; rows that are not much shorter than usual come first.
            shorter = [n for n in range(_LEAST_PATCHES, row // 2 + 1) if row % n == 0]
            rows = sorted(shorter, key=lambda n: (n < _USUAL_PATCHES, n)) or [
                min(2 * _LEAST_PATCHES, row // 2)
            ]
            if not has(node, _PATCH):
                rows = [_FEW_STRIDES]
            towers[side[0]] = [
                _Tower(side[0], small * patch[0] + side[0] % patch[0], row, small) for small in rows
            ]
    choices = itertools.zip_longest(*towers.values())
    filled = (
        [each or options[-1] for each, options in zip(choice, towers.values(), strict=True)]
        for choice in choices
    )
    return [_Fewer(tuple(chosen)).apply for chosen in itertools.islice(filled, _MOST_GRIDS) if chosen]


@dataclass(frozen=True, slots=True)
class _Fewer:
    """Smaller images of all towers."""

    towers: tuple[_Tower, ...]

    def apply(self, config: Any) -> None:
        """Change all numbers of a config that depend on the size of its images, in place."""
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
    """Make sounds shorter, with the same number of windows if a tower divides them."""
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
    """Return a smaller size of chunks, or the smaller size of each layer."""
    if isinstance(value, list):
        return [_smaller_chunk(each, size) for each in value]
    return size if type(value) is int and size < value <= _LARGEST_CHUNK else value
