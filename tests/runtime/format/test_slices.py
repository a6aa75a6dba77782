"""The slice arithmetic, against a position-by-position model of what a tree means."""

from __future__ import annotations

import math
import time
from collections import Counter
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format import slices
from shardconv_runtime.format.dims import (
    MAX_DEPTH,
    Dim,
    Leaf,
    Product,
    Sum,
    axes_of,
    open_parts,
    parse,
    size,
    to_text,
)
from shardconv_runtime.format.slices import Mesh, gather_index

MESHES = [(), (1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (4, 3), (2, 2, 2), (3, 2, 2), (1, 4)]

MOST_POSITIONS = 2000
"""Of a dim: the model looks at each of them."""


@st.composite
def dims(draw: st.DrawFn, axes: frozenset[int], depth: int = 3) -> Dim:
    """A tree whose products use each axis once; parts of one kind may be nested in each other."""
    kind = draw(st.sampled_from(["leaf", "leaf", "product", "sum"] if depth else ["leaf"]))
    if kind == "leaf":
        chosen = draw(st.permutations(sorted(axes)))[: draw(st.integers(0, 2))]
        return Leaf(draw(st.integers(1, 9)), tuple(chosen))
    if kind == "sum":
        parts = draw(st.lists(dims(axes, depth - 1), min_size=2, max_size=3))
        return Sum(tuple(parts))
    left = draw(st.frozensets(st.sampled_from(sorted(axes)))) if axes else axes
    return Product((draw(dims(left, depth - 1)), draw(dims(axes - left, depth - 1))))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Dim, Mesh]:
    mesh = draw(st.sampled_from(MESHES))
    tree = dims(frozenset(range(len(mesh)))).filter(lambda dim: size(dim) <= MOST_POSITIONS)
    return draw(tree), mesh


def holds(dim: Dim, mesh: Mesh, coords: tuple[int, ...], position: int) -> tuple[bool, frozenset[int]]:
    """Whether the rank at ``coords`` holds ``position``, and the axes that decide it: the slow model."""
    if isinstance(dim, Leaf):
        parts = math.prod(mesh[a] for a in dim.axes)
        part = 0
        for a in dim.axes:
            part = part * mesh[a] + coords[a]
        shares = [dim.size // parts + (i < dim.size % parts) for i in range(parts)]
        first = sum(shares[:part])
        return first <= position < first + shares[part], frozenset(dim.axes)
    if isinstance(dim, Sum):
        for segment in dim.segments:
            if position < size(segment):
                return holds(segment, mesh, coords, position)
            position -= size(segment)
        raise AssertionError("position outside of the sum")
    held, axes = True, frozenset[int]()
    for factor in reversed(dim.factors):
        position, inner = divmod(position, size(factor))
        answer, more = holds(factor, mesh, coords, inner)
        held, axes = held and answer, axes | more
    return held, axes


def positions(dim: Dim, mesh: Mesh, rank: int) -> list[int]:
    return [i for start, stop in slices.ranges(dim, mesh, rank) for i in range(start, stop)]


@settings(deadline=None)
@given(cases())
def test_ranges_are_what_the_tree_means(case: tuple[Dim, Mesh]) -> None:
    dim, mesh = case
    slices.validate(dim, mesh)
    ranks = range(math.prod(mesh))
    held = {rank: positions(dim, mesh, rank) for rank in ranks}
    for rank in ranks:
        coords = slices.coordinates(mesh, rank)
        assert held[rank] == [i for i in range(size(dim)) if holds(dim, mesh, coords, i)[0]]
        assert len(held[rank]) == slices.local_size(dim, mesh, rank)
    copies = Counter(chain.from_iterable(held.values()))
    for position in range(size(dim)):
        axes = holds(dim, mesh, (0,) * len(mesh), position)[1]
        assert copies[position] == math.prod(extent for a, extent in enumerate(mesh) if a not in axes)


@settings(deadline=None)
@given(cases())
def test_ranges_ascend_and_are_maximal(case: tuple[Dim, Mesh]) -> None:
    dim, mesh = case
    for rank in range(math.prod(mesh)):
        found = slices.ranges(dim, mesh, rank)
        assert all(start < stop for start, stop in found)
        assert all(before[1] < after[0] for before, after in pairwise(found))


@settings(deadline=None)
@given(cases())
def test_text_round_trip(case: tuple[Dim, Mesh]) -> None:
    dim, _ = case
    assert parse(to_text(dim)) == dim


@settings(deadline=None)
@given(cases(), st.data())
def test_gather_index_rebuilds_the_dim(case: tuple[Dim, Mesh], data: st.DataObject) -> None:
    dim, mesh = case
    extra = data.draw(st.frozensets(st.sampled_from(range(len(mesh))))) if mesh else frozenset[int]()
    axes = axes_of(dim) | extra
    index = gather_index(dim, mesh, axes if extra else None)
    members = slices.group_of(mesh, axes, data.draw(st.integers(0, math.prod(mesh) - 1)))
    pieces = [positions(dim, mesh, rank) for rank in members]
    assert index.sizes == tuple(map(len, pieces))
    stride = max(index.sizes)
    for used, parts in ((None, pieces), (stride, [[*p, *[-1] * (stride - len(p))] for p in pieces])):
        joined = [i for part in parts for i in part]
        found = [i for start, stop in index.ranges(used) for i in joined[start:stop]]
        assert found == list(range(size(dim)))


def test_uneven_leaf_needs_no_reordering_without_padding() -> None:
    index = gather_index(Leaf(50257, (0,)), (8,))
    assert index.sizes == (6283,) + (6282,) * 7
    assert index.ranges() == ((0, 50257),)
    assert index.ranges(stride=6283)[:2] == ((0, 6283 + 6282), (2 * 6283, 2 * 6283 + 6282))


def test_gather_over_too_few_axes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"lacks axes \[1\]"):
        gather_index(Leaf(8, (0, 1)), (2, 2), axes=(0,))


def test_large_sizes_stay_ranges() -> None:
    begin = time.perf_counter()
    fused = parse("128256@0*4096 + 8@0*128*4096")
    for rank in range(8):
        assert len(slices.ranges(fused, (8,), rank)) == 2
    assert len(gather_index(fused, (8,)).pieces) == 16
    assert len(slices.ranges(parse("128256*4096@0"), (8,), 3)) == 128256
    assert time.perf_counter() - begin < 10


def test_ranges_without_bound_are_refused() -> None:
    with pytest.raises(PlanError, match="shard an outer factor"):
        slices.ranges(parse("1000000000*2@0"), (2,), 0)


def test_uneven_shares_first_ranks_take_more() -> None:
    dim = parse("9@0*64")
    assert [slices.ranges(dim, (4,), rank) for rank in range(4)] == [
        ((0, 192),),
        ((192, 320),),
        ((320, 448),),
        ((448, 576),),
    ]


def test_more_ranks_than_positions() -> None:
    assert [slices.ranges(Leaf(1, (0,)), (3,), rank) for rank in range(3)] == [((0, 1),), (), ()]


def test_ranks_and_coordinates() -> None:
    mesh = (2, 3, 2)
    assert [slices.rank_at(mesh, slices.coordinates(mesh, rank)) for rank in range(12)] == list(range(12))
    assert slices.group_of(mesh, (1,), 7) == (7, 9, 11)
    assert slices.group_of(mesh, (0, 2), 4) == (4, 5, 10, 11)


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "@0", "4@", "4@a", "4@0.", "4@-1", "4 @0", "04", "-4", "4.0", "4 4", "4\n", "9" * 19],
        *["4**2", "4+", "+4", "(4", "4)", "()", "x", "٤", "(" * 5000 + "1" + ")" * 5000],
    ],
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(PlanError):
        parse(text)


def test_parse_reads_what_the_grammar_allows() -> None:
    assert parse("(4)") == Leaf(4)
    assert parse(" 32@0*128+8@0 * 128 ") == Sum(
        (Product((Leaf(32, (0,)), Leaf(128))), Product((Leaf(8, (0,)), Leaf(128))))
    )
    assert parse("2*(3 + 1@0.1)") == Product((Leaf(2), Sum((Leaf(3), Leaf(1, (0, 1))))))


def test_single_parts_are_written_as_the_part() -> None:
    assert to_text(Product((Sum((Product((Leaf(4, (0,)),)),)), Leaf(2)))) == "4@0*2"


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        (Leaf(0), "1 or more"),
        (Leaf(4, (2,)), r"outside of the mesh \[2, 2\]"),
        (Leaf(4, (-1,)), "outside of the mesh"),
        (Leaf(4, (0, 0)), "named twice"),
        (Product((Leaf(4, (0,)), Leaf(8, (0, 1)))), "axis 0 shards two factors"),
        (Product((Sum((Leaf(4, (1,)), Leaf(4))), Leaf(8, (1,)))), "axis 1 shards two factors"),
        (Product(()), "has no parts"),
        (Product((Leaf(2**40), Leaf(2**40))), "is above"),
    ],
)
def test_validate_refuses(dim: Dim, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        slices.validate(dim, (2, 2))


def test_validate_refuses_deep_trees() -> None:
    dim: Dim = Leaf(1)
    for _ in range(MAX_DEPTH + 1):
        dim = Sum((dim, Leaf(1)))
    with pytest.raises(PlanError, match="deeper"):
        slices.validate(dim, (2,))


def test_segments_may_share_an_axis_but_dims_may_not() -> None:
    fused = parse("32@0*128 + 8@0*128")
    slices.validate_tensor((fused, Leaf(4096)), (2,))
    slices.validate_tensor((fused, Leaf(4096, (1,))), (2, 2))
    with pytest.raises(PlanError, match="axis 0 shards more than one dim"):
        slices.validate_tensor((fused, Leaf(4096, (0,))), (2,))


@pytest.mark.parametrize("text", ["?*8@0", "8@0*?", "4*?*8@0"])
def test_an_open_factor_leaves_the_known_parts(text: str) -> None:
    dim = parse(text)
    assert to_text(dim) == text
    parts = open_parts(dim)
    assert parts is not None
    outer, _, inner = text.partition("?")
    known = [size(parse(t.strip("*"))) if t else 1 for t in (outer, inner)]
    assert [size(p) for p in parts] == known


def test_a_known_dim_has_no_open_part() -> None:
    assert open_parts(parse("4@0*8")) is None


@pytest.mark.parametrize("text", ["?*?*8@0", "?*8@0 + 3", "(?*2 + 4)*8@0"])
def test_an_open_factor_in_another_place_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="only one factor"):
        open_parts(parse(text))
