"""Stored tensors in memory: as a checkpoint, and their parts for a part of the weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from shardconv_runtime.format.plan import PackedTensor
from shardconv_runtime.packed import formats
from shardconv_runtime.packed.formats import check_values, dequantize
from shardconv_runtime.packed.stored_weights import Found, Info, WeightSlice, stored_positions

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint whose tensors are at hand."""

    values: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path) -> MemoryCheckpoint:
        with safe_open(directory / "model.safetensors", "pt") as file:
            metadata = file.metadata() or {}
        return cls(load_file(directory / "model.safetensors"), metadata)

    @property
    def tensors(self) -> dict[str, Info]:
        return {n: Info(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in self.values.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.values[name]

    def stored(self, found: Found) -> Tensors:
        """The stored tensors of a parameter, in the shape of their dims."""
        whole, out = WeightSlice.whole(found.shape), {}
        for stored in found.packing.tensors:
            shape = [len(stored_positions(dim, whole)) for dim in stored.dims]
            out[stored.name] = self.values[found.tensors[stored.name]].reshape(shape)
        return out


def part(tensor: torch.Tensor, stored: PackedTensor, held: WeightSlice) -> torch.Tensor:
    """What a rank's file has of a stored tensor: out of the ranges and the steps, one element at a time."""
    for place, dim in enumerate(stored.dims):
        if dim.of is not None:
            kept = torch.tensor(sorted({p // dim.step for p in positions(held, dim.of)}), dtype=torch.long)
            tensor = as_bytes(tensor).index_select(place, kept).view(tensor.dtype)
    return tensor


def few_at_once(found: Found, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """The weight, a third or fewer of its values computed at a time."""
    with mock.patch.object(formats, "VALUES_AT_ONCE", math.prod(found.shape) // 3):
        return dequantize(found.packing, tensors, WeightSlice.whole(found.shape), dtype)


def positions(held: WeightSlice, dim: int) -> list[int]:
    """The global positions that are held."""
    return [position for a, b in held.ranges[dim] for position in range(a, b)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of one byte for each element as such, since torch selects none of some of these dtypes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def require_equal_parts(found: Found, tensors: Tensors, held: WeightSlice) -> None:
    """dequantize(part) is part(dequantize), bit for bit, in the dtype of the format and in bfloat16."""
    parts = {stored.name: part(tensors[stored.name], stored, held) for stored in found.packing.tensors}
    check_values(found.packing, parts, held, "weight")
    for dtype in (torch.float32, torch.bfloat16):
        expected = dequantize(found.packing, tensors, WeightSlice.whole(found.shape), dtype)
        assert torch.equal(few_at_once(found, tensors, dtype), expected)
        for dim in range(len(held.shape)):
            kept = torch.tensor(positions(held, dim), dtype=torch.long)
            expected = expected.index_select(dim, kept)
        local = dequantize(found.packing, parts, held, dtype)
        assert local.dtype == dtype
        assert torch.equal(local, expected)


def granularity(found: Found, dim: int) -> int:
    """The steps in which a dim may be cut."""
    return math.lcm(*(d.step for stored in found.packing.tensors for d in stored.dims if d.of == dim))


@st.composite
def helds(draw: st.DrawFn, found: Found) -> WeightSlice:
    """A rank's part: uneven shares of one dim, of segments of it, or of two dims; perhaps nothing."""
    ranges = []
    for dim, size in enumerate(found.shape):
        step = granularity(found, dim)
        count = -(-size // step)
        cuts = sorted(draw(st.sets(st.integers(0, count), max_size=4)))
        spans = [(cuts[i] * step, min(cuts[i + 1] * step, size)) for i in range(0, len(cuts) - 1, 2)]
        ranges.append(tuple(spans) if draw(st.booleans()) else ((0, size),))
    return WeightSlice(found.shape, tuple(ranges))


def even_parts(found: Found, ranks: int) -> Iterator[WeightSlice]:
    """For each dim, the parts of some ranks that share it as evenly as it may be cut, the first ones more."""
    for dim, size in enumerate(found.shape):
        step = granularity(found, dim)
        small, larger = divmod(-(-size // step), ranks)
        start = 0
        for rank in range(ranks):
            stop = min(start + (small + (rank < larger)) * step, size)
            spans = [((0, other),) for other in found.shape]
            spans[dim] = ((start, stop),) if start < stop else ()
            start = stop
            yield WeightSlice(found.shape, tuple(spans))
