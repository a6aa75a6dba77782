"""Copies of a config have smaller images, sounds, or chunks of a text.

None of these is a size of a matrix, but all determine how many activations a call has. A smaller grid of
patches makes the numbers smaller that depend on it: the number of patches, of merged tokens, and of the
images that a large one is divided into.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .config_sizes import has, int_of, nodes, pair

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


_MOST_GRIDS = 3


Change = Callable[[Any], None]
"""Changes a config in place."""


_CHUNK_SIZES, _LARGEST_CHUNK = (32, 64), 1024
"""Sizes of chunks (of scans, blocks or windows) to which the text of a trace is padded: short texts fit in
the first, texts with sounds or images in the second. Larger chunks than ``_LARGEST_CHUNK`` are only used for
masks."""


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
