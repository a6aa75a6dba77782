"""Sizes in a config, under names that many configs use, and configs with smaller ones."""

from __future__ import annotations

from collections.abc import Collection
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
    sizes = (int_of(n, name) for n in nodes(config) for name in names)
    return list(dict.fromkeys(value for value in sizes if value > 0))


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
