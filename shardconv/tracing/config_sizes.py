"""Sizes in a config and those in it, under names that many configs use."""

from __future__ import annotations

from collections.abc import Collection
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
