"""Boxes of what processes hold: owned ones tile the tensor, held ones are all of the local tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from converted import local_part
from hypothesis import given
from hypothesis import strategies as st
from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, parse
from shardconv_runtime.format.plan import ParameterPlan, global_shape
from shardconv_runtime.format.slices import Mesh
from shardconv_runtime.format.stored_layout import holds_values
from shardconv_runtime.saving.dcp_boxes import Box, held_boxes, owned_boxes
from shardconv_runtime.saving.local_windows import LocalWindow, full_window
from torch import Tensor

MESHES: tuple[Mesh, ...] = ((), (2,), (3,), (2, 2), (2, 3))


def dims(axes: tuple[int, ...]) -> st.SearchStrategy[Dim]:
    """Sums of products of leaves, some split over these axes, each axis once in a product."""
    choices = [(), *((axis,) for axis in axes), axes]
    leaf = st.builds(Leaf, st.integers(1, 7), st.sampled_from(choices))
    unsplit = st.builds(Leaf, st.integers(1, 3))
    split = st.builds(lambda a, b, c: Product((a, b, c)), unsplit, leaf, unsplit)
    return st.one_of(leaf, split, st.builds(lambda a, b: Sum((a, b)), st.one_of(leaf, split), leaf))


@st.composite
def parameters(draw: st.DrawFn) -> tuple[ParameterPlan, Mesh]:
    """A tensor of two dims over a mesh, each axis in one dim; axes that are in none may be partial."""
    mesh = draw(st.sampled_from(MESHES))
    axes = tuple(range(len(mesh)))
    first = draw(st.sampled_from([axes[:i] for i in range(len(axes) + 1)]))
    second = tuple(axis for axis in axes if axis not in first)
    has_partial = draw(st.booleans())
    plan = (draw(dims(first)), draw(dims(() if has_partial else second)))
    return ParameterPlan(("w",), plan, "float64", partial=second if has_partial else ()), mesh


def numbered(entry: ParameterPlan) -> Tensor:
    shape = global_shape(entry)
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)


def place(boxes: Sequence[Box], source: Tensor, target: Tensor, counts: Tensor) -> None:
    """Copy boxes of a local tensor to the full one."""
    for box in boxes:
        inside = tuple(slice(a, a + n) for a, n in zip(box.local_offsets, box.sizes, strict=True))
        outside = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        target[outside] = source[inside]
        counts[outside] += 1


def windows(shape: Sequence[int], parts: int) -> list[LocalWindow]:
    """Chunks of dim 0, as data-parallel processes hold them."""
    length = -(-shape[0] // parts)
    starts = [min(part * length, shape[0]) for part in range(parts + 1)]
    return [((a, b), *((0, n) for n in shape[1:])) for a, b in itertools.pairwise(starts)]


@given(parameters(), st.integers(1, 3))
def test_owned_boxes_tile_the_tensor(found: tuple[ParameterPlan, Mesh], parts: int) -> None:
    entry, mesh = found
    want = numbered(entry)
    full, counts = torch.zeros_like(want), torch.zeros_like(want)
    for rank in range(math.prod(mesh)):
        local = local_part(want, entry, mesh, rank)
        for window in windows(local.shape, parts):
            part = local[window[0][0] : window[0][1]]
            place(owned_boxes(entry, mesh, rank, window), part, full, counts)
    assert torch.equal(full, want)
    assert bool((counts == 1).all())


@given(parameters(), st.integers(1, 3))
def test_held_boxes_fill_the_window(found: tuple[ParameterPlan, Mesh], parts: int) -> None:
    entry, mesh = found
    want = numbered(entry)
    for rank in range(math.prod(mesh)):
        local = local_part(want, entry, mesh, rank)
        for window in windows(local.shape, parts):
            part = torch.zeros_like(local[window[0][0] : window[0][1]])
            turned = [Box(b.local_offsets, b.sizes, b.offsets) for b in held_boxes(entry, mesh, rank, window)]
            place(turned, want, part, torch.zeros_like(part))
            assert torch.equal(part, local[window[0][0] : window[0][1]])


@pytest.mark.parametrize(
    ("dim", "mesh", "owned"),
    [
        ("4@0 + 2", (2,), [[(0, 2), (4, 2)], [(2, 2)]]),
        ("4", (2,), [[(0, 4)], []]),
        ("3@0*2", (2,), [[(0, 4)], [(4, 2)]]),
        ("4@0.1 + 2@0", (2, 2), [[(0, 1), (4, 1)], [(1, 1)], [(2, 1), (5, 1)], [(3, 1)]]),
        ("2@0", (3,), [[(0, 1)], [(1, 1)], []]),
    ],
)
def test_the_lowest_rank_owns(dim: str, mesh: Mesh, owned: list[list[tuple[int, int]]]) -> None:
    entry = ParameterPlan(("w",), (parse(dim),), "float32")
    for rank, want in enumerate(owned):
        found = owned_boxes(entry, mesh, rank, full_window(entry, mesh, rank))
        assert [(box.offsets[0], box.sizes[0]) for box in found] == want


def test_a_partial_one_is_that_of_the_rank_with_values() -> None:
    entry = ParameterPlan(("w",), (parse("6@1"),), "float32", partial=(0,))
    for rank in range(4):
        boxes = held_boxes(entry, (2, 2), rank, full_window(entry, (2, 2), rank))
        assert bool(boxes) == holds_values(entry, (2, 2), rank) == (rank < 2)
