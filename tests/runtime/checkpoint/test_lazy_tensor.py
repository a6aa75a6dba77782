"""Lazy tensors are what torch makes of the same operations on the same bytes."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lazy_cases import DTYPES, Files, bits, factorise, pairs, random_tensor, same, shapes, spans, take_torch
from shardconv_runtime.checkpoint import lazy_tensor
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, LazyTensor

slow_to_draw = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """One directory for all examples."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def covered_once(tensor: LazyTensor) -> bool:
    """Whether each position is in exactly one box."""
    count = torch.zeros(tensor.shape, dtype=torch.int32)
    for piece in tensor.pieces:
        count[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))] += 1
    return bool((count == 1).all())


@slow_to_draw
@given(st.data())
def test_random_expressions(directory: Path, data: st.DataObject) -> None:
    tensor, expected = data.draw(pairs(Files(directory)))
    assert tensor.shape == expected.shape
    assert tensor.num_bytes == expected.numel() * expected.itemsize
    assert covered_once(tensor)
    assert same(read_tensor(tensor), expected)


@slow_to_draw
@given(st.sampled_from(DTYPES), shapes(), st.data())
def test_what_is_contiguous_has_every_shape(
    directory: Path, dtype: str, shape: tuple[int, ...], data: st.DataObject
) -> None:
    real = random_tensor(dtype, shape, 1)
    wanted = factorise(data.draw, real.numel())
    found = lazy_tensor.reshape(Files(directory).add(real), wanted)
    assert found is not None
    assert same(read_tensor(found), real.reshape(wanted))


@slow_to_draw
@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.data())
def test_parts_laid_end_to_end_have_a_shape_if_each_part_is_a_box_of_it(
    directory: Path, sizes: list[int], data: st.DataObject
) -> None:
    files = Files(directory)
    reals = [random_tensor("float32", (size,), seed) for seed, size in enumerate(sizes)]
    joined = torch.cat(reals)
    shape = factorise(data.draw, joined.numel())
    found = lazy_tensor.reshape(lazy_tensor.concatenate([files.add(real) for real in reals], 0), shape)
    ends = list(itertools.accumulate(sizes))
    boxes = [is_box(range(end - size, end), shape) for end, size in zip(ends, sizes, strict=True) if size]
    assert (found is not None) == all(boxes)
    if found is not None:
        assert same(read_tensor(found), joined.reshape(shape))


def is_box(positions: range, shape: tuple[int, ...]) -> bool:
    """Brute force: whether flat positions are a box of a shape."""
    marked = torch.zeros(shape, dtype=torch.bool)
    marked.view(-1)[positions.start : positions.stop] = True
    places = marked.nonzero()
    extents = places.max(0).values - places.min(0).values + 1
    return int(extents.prod()) == len(positions)


@slow_to_draw
@given(st.data())
def test_rows_of_a_flattened_matrix(directory: Path, data: st.DataObject) -> None:
    """What conversions do: whole rows stay boxes when dims are split or merged."""
    real = random_tensor("float32", (4, 6, 5), 2)
    tensor = Files(directory).add(real)
    rows = data.draw(spans(4))
    found = lazy_tensor.reshape(
        lazy_tensor.take(tensor, 0, rows), (6 * sum(stop - start for start, stop in rows), 5)
    )
    assert found is not None
    assert same(read_tensor(found), take_torch(real, 0, rows).reshape(-1, 5))


def test_a_reshape_across_a_transpose_or_a_column_slice_is_refused(tmp_path: Path) -> None:
    tensor = Files(tmp_path).add(random_tensor("float32", (4, 6), 3))
    assert lazy_tensor.reshape(lazy_tensor.permute(tensor, (1, 0)), (24,)) is None
    assert lazy_tensor.reshape(lazy_tensor.take(tensor, 1, ((0, 3),)), (12,)) is None
    assert lazy_tensor.reshape(lazy_tensor.take(tensor, 1, ((0, 3),)), (4, 3, 1)) is not None


def test_a_second_cast_is_refused(tmp_path: Path) -> None:
    tensor = Files(tmp_path).add(random_tensor("float32", (3,), 4))
    half = lazy_tensor.cast(tensor, "float16")
    assert half is not None
    assert half.is_cast
    assert lazy_tensor.cast(half, "float16") is half
    assert lazy_tensor.cast(half, "float32") is None


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    files = Files(tmp_path)
    a, b = (files.add(random_tensor("float32", shape, 5)) for shape in ((2, 3), (2, 4)))
    with pytest.raises(ValueError, match=r"shapes \[\(2, 3\), \(2, 4\)\] cannot be joined along dim 0"):
        lazy_tensor.concatenate([a, b], 0)
    assert lazy_tensor.concatenate([a, b], 1).shape == (2, 7)


def test_a_computed_leaf_is_computed_when_it_is_read() -> None:
    calls = []

    def compute() -> torch.Tensor:
        calls.append(0)
        return torch.arange(12, dtype=torch.int64).reshape(3, 4).t()  # strided: it is read row-major

    tensor = lazy_tensor.from_leaf(ComputedLeaf("test", compute, "int64", 12), (4, 3))
    part = lazy_tensor.permute(lazy_tensor.take(tensor, 0, ((1, 3),)), (1, 0))
    assert not calls
    assert torch.equal(read_tensor(part), torch.arange(12).reshape(3, 4)[:, 1:3])
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_passes(tmp_path: Path, dtype: str) -> None:
    item = torch.empty((), dtype=getattr(torch, dtype)).itemsize
    raw = torch.arange(256, dtype=torch.uint8).repeat_interleave(item)
    raw = raw % 2 if dtype == "bool" else raw
    tensor = Files(tmp_path).add(raw.view(getattr(torch, dtype)).reshape(16, 16))
    assert bits(read_tensor(tensor)) == bits(raw)
    assert bits(read_tensor(lazy_tensor.permute(lazy_tensor.permute(tensor, (1, 0)), (1, 0)))) == bits(raw)
