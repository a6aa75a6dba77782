"""Which stretches of a leaf are asked for over a network."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from shardconv_runtime.checkpoint.boxes import BoxDim, Move, source_stretches, wanted


@st.composite
def moves(draw: st.DrawFn) -> Move:
    """A box of a row-major leaf of up to three dims."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dims, stride, first = [], 1, 0
    for size in reversed(sizes):
        start = draw(st.integers(0, size - 1))
        count = draw(st.integers(1, size - start))
        first += start * stride
        if count > 1:
            dims.append(BoxDim(count, stride, stride))
        stride *= size
    return Move(0, 0, first, tuple(reversed(dims)), "float32")


def elements(move: Move) -> set[int]:
    found = {move.source}
    for dim in move.dims:
        found = {start + index * dim.source for start in found for index in range(dim.size)}
    return found


@given(st.lists(moves(), min_size=1, max_size=4), st.integers(0, 6))
def test_they_hold_what_is_wanted_and_short_gaps(boxes: list[Move], gap: int) -> None:
    need = set().union(*map(elements, boxes))
    found = list(wanted(boxes, gap))
    assert all(stop - start > 0 for start, stop in found)
    assert all(b[0] - a[1] > gap for a, b in itertools.pairwise(found))
    held = {index for start, stop in found for index in range(start, stop)}
    assert need <= held
    assert {start for start, _ in found} | {stop - 1 for _, stop in found} <= need
    if gap == 0:
        assert held == need


@given(moves())
def test_their_number_is_known_before(box: Move) -> None:
    run, count, stride = source_stretches(box.dims)
    assert run * count == len(elements(box))
    found = list(wanted([box], 0))
    assert count == len(found)
    if count > 1:
        assert min(b[0] - a[0] for a, b in itertools.pairwise(found)) == stride
