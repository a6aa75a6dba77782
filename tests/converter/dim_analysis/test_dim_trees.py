"""Trees of dims: known structures, and properties of random sequences of operations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardconv.dim_analysis import dim_trees
from shardconv.dim_analysis.analysis import corresponding_leaves
from shardconv.dim_analysis.dim_trees import PRODUCT, SUM, IncompatibleDims, Node, find, leaf

# Known structures ----------------------------------------------------------------------------------


def test_a_view_splits_a_leaf_everywhere() -> None:
    a, b = leaf(48), leaf(48)
    dim_trees.unify(a, b)
    outer, inner = dim_trees.split(a, 6)
    assert repr(b) == "(8*6)"
    assert dim_trees.leaves(b) == [find(outer), find(inner)]


def test_fused_query_key_value_with_groups() -> None:
    """``(4 groups of 2 heads + 4 + 4) * 6``, out of cuts and views alone."""
    fused = leaf(96)
    q, k, v = dim_trees.cut(fused, (48, 24, 24))
    heads, width = dim_trees.split(q, 6)
    for part in (k, v):
        kv, part_width = dim_trees.split(part, 6)
        dim_trees.unify(part_width, width)
        groups, _ = dim_trees.split(heads, 2)
        dim_trees.unify(groups, kv)
    assert repr(fused) == "[((4*2)*6)|(4*6)|(4*6)]"
    kv_leaves = [x for x in dim_trees.leaves(fused) if x.size == 4]
    assert len(kv_leaves) == 3
    assert len({id(find(x)) for x in kv_leaves}) == 1


def test_interleaved_query_key_value() -> None:
    fused = leaf(144)
    _, strands = dim_trees.split(fused, 18)
    parts = dim_trees.cut(strands, (6, 6, 6))
    dim_trees.unify(parts[0], parts[1])
    assert repr(fused) == "(8*[6|6|6])"
    assert find(parts[0]) is find(parts[1])
    assert find(parts[0]) is not find(parts[2])


def test_a_sum_whose_segments_share_an_inner_factor_is_split() -> None:
    fused = leaf(40)
    dim_trees.cut(fused, (24, 16))
    outer, inner = dim_trees.split(fused, 8)
    assert repr(fused) == "([3|2]*8)"
    assert (repr(outer), repr(inner)) == ("[3|2]", "8")


def test_rotary_halves() -> None:
    dim = leaf(12)
    a, b = dim_trees.cut(dim, (6, 6))
    turned = dim_trees.concatenation([b, a])
    dim_trees.unify(dim, turned)
    assert repr(dim) == "[6|6]"
    assert find(a) is find(b)


def test_a_repetition_is_a_blocked_count_of_one_run() -> None:
    a, b = leaf(3), leaf(5)
    twice = dim_trees.concatenation([a, b, a, b])
    count, run = dim_trees.split(twice, 8)
    assert (count.size, count.blocked) == (2, True)
    assert repr(run) == "[3|5]"
    assert not run.blocked


def test_a_cut_through_a_factor_is_a_conflict() -> None:
    dim = leaf(24)
    dim_trees.split(dim, 6)
    with pytest.raises(IncompatibleDims):
        dim_trees.cut(dim, (9, 15))
    assert [p.size for p in dim_trees.cut(dim, (6, 18))] == [6, 18]


@pytest.mark.parametrize("inner", [5, 7, 48])
def test_a_split_at_no_divisor_is_a_conflict(inner: int) -> None:
    with pytest.raises(IncompatibleDims):
        dim_trees.split(leaf(24), inner)


def test_splits_that_do_not_fit_together_block_both() -> None:
    a, b = leaf(36), leaf(36)
    dim_trees.split(a, 4)
    dim_trees.split(b, 6)
    dim_trees.unify(a, b)
    assert all(x.blocked for x in dim_trees.leaves(a) + dim_trees.leaves(b))
    assert any(x.why for x in dim_trees.leaves(a))


def test_a_dim_that_is_joined_with_itself_a_shift_further_on_is_blocked() -> None:
    """Each position belongs to the next one; cutting them apart one by one would take as many steps."""
    dim = leaf(5000)
    padded, shifted = dim_trees.concatenation([dim, leaf(3)]), dim_trees.concatenation([leaf(3), dim])
    dim_trees.unify(padded, shifted)
    assert dim.blocked
    assert find(dim).kind == dim_trees.LEAF


def test_segments_that_change_places_are_not_blocked() -> None:
    x, y = leaf(4), leaf(4)
    dim_trees.unify(dim_trees.concatenation([x, y]), dim_trees.concatenation([y, x]))
    assert find(x) is find(y)
    assert not find(x).blocked


def test_empty_parts() -> None:
    dim = leaf(8)
    parts = dim_trees.cut(dim, (0, 8, 0))
    assert [p.size for p in parts] == [0, 8, 0]
    assert find(parts[1]) is dim
    assert dim_trees.concatenation(parts) is dim
    assert dim_trees.leaves(parts[0]) == []


def test_ones_are_never_sharded() -> None:
    assert leaf(1).blocked
    assert not leaf(2).blocked
    outer, inner = dim_trees.split(leaf(6), 6)
    assert (outer.size, inner.size) == (1, 6)
    assert dim_trees.product([leaf(1), leaf(1)]).size == 1


def test_links_carry_structure_but_not_identity() -> None:
    a, b = leaf(48), leaf(48)
    dim_trees.link(a, b)
    dim_trees.split(a, 6)
    assert repr(b) == "(8*6)"
    pairs = corresponding_leaves(a, b)
    assert pairs is not None
    assert [(x.size, y.size) for x, y in pairs] == [(8, 8), (6, 6)]
    assert all(x is not y for x, y in pairs)
    dim_trees.split(dim_trees.split(b, 6)[0], 2)
    assert repr(a) == "((4*2)*6)"
    dim_trees.block(a)
    assert not any(x.blocked for x in dim_trees.leaves(b))


def test_links_of_links_follow() -> None:
    chain = [leaf(12) for _ in range(4)]
    for a, b in itertools.pairwise(chain):
        dim_trees.link(a, b)
    dim_trees.cut(chain[0], (4, 8))
    assert [repr(x) for x in chain] == ["[4|8]"] * 4


def test_a_leaf_that_occurs_twice_does_so_on_the_other_side() -> None:
    a = leaf(6)
    twice, other = dim_trees.concatenation([a, a]), leaf(12)
    dim_trees.link(twice, other)
    first, second = dim_trees.leaves(other)
    assert first is second
    assert first is not a


# Properties ----------------------------------------------------------------------------------------


def _is_sane(node: Node) -> bool:
    node = find(node)
    if node.kind == PRODUCT:
        return node.size == math.prod(c.size for c in node.children) and all(map(_is_sane, node.children))
    if node.kind == SUM:
        return node.size == sum(c.size for c in node.children) and all(map(_is_sane, node.children))
    return True


def _act(data: Any, kind: str, node: Node, other: Node, nodes: list[Node]) -> None:
    """One operation; what it makes joins ``nodes``."""
    if kind == "split":
        inner = data.draw(st.sampled_from([d for d in range(1, node.size + 1) if node.size % d == 0]))
        made = dim_trees.split(node, inner)
        assert (made[0].size, made[1].size) == (node.size // inner, inner)
        assert made[0].size * made[1].size == node.size
        nodes += made
    elif kind == "cut":
        at = sorted(data.draw(st.lists(st.integers(0, node.size), max_size=2)))
        sizes = [b - a for a, b in zip([0, *at], [*at, node.size], strict=True)]
        parts = dim_trees.cut(node, sizes)
        assert [p.size for p in parts] == sizes
        nodes += [p for p in parts if p.size]
    elif kind == "block":
        dim_trees.block(node)
        assert all(x.blocked for x in dim_trees.leaves(node))
    elif kind == "product" and node.size * other.size <= 200:
        nodes.append(dim_trees.product([node, other]))
        assert nodes[-1].size == node.size * other.size
    elif kind == "sum" and node.size + other.size <= 200:
        nodes.append(dim_trees.concatenation([node, other]))
        assert nodes[-1].size == node.size + other.size


def _join(kind: str, a: Node, b: Node) -> None:
    if kind == "unify":
        dim_trees.unify(a, b)
        if a.size > 1 and not all(x.blocked for x in dim_trees.leaves(a) + dim_trees.leaves(b)):
            assert [id(find(x)) for x in dim_trees.leaves(a)] == [id(find(x)) for x in dim_trees.leaves(b)]
    else:
        dim_trees.link(a, b)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_operations(data: st.DataObject) -> None:
    """Sizes are conserved, unified dims have the same leaves, and only conflicts are raised."""
    nodes = [leaf(n) for n in data.draw(st.lists(st.sampled_from([4, 6, 8, 12, 24]), min_size=2, max_size=4))]
    kinds = st.sampled_from(["split", "cut", "block", "product", "sum", "unify", "unify", "link", "link"])
    for _ in range(data.draw(st.integers(1, 12))):
        node = data.draw(st.sampled_from(range(len(nodes))))
        kind = data.draw(kinds)
        alike = [x for x in nodes if x.size == nodes[node].size]
        other = alike[data.draw(st.integers(0, len(alike) - 1))]
        sizes = [x.size for x in nodes]
        try:
            if kind in ("unify", "link"):
                _join(kind, nodes[node], other)
            else:
                _act(data, kind, nodes[node], other, nodes)
        except IncompatibleDims:
            assert kind in ("split", "cut")
        assert [find(x).size for x in nodes[: len(sizes)]] == sizes
        assert all(map(_is_sane, nodes))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_linked_dims_stay_alike(data: st.DataObject) -> None:
    """Whatever one side is refined to, the other follows, or neither is refined."""
    size = data.draw(st.sampled_from([12, 24, 36]))
    a, b = leaf(size), leaf(size)
    dim_trees.link(a, b)
    for _ in range(data.draw(st.integers(1, 5))):
        side = data.draw(st.sampled_from([a, b]))
        parts = dim_trees.leaves(side)
        part = parts[data.draw(st.integers(0, len(parts) - 1))]
        try:
            _act(data, data.draw(st.sampled_from(["split", "cut"])), part, part, [])
        except IncompatibleDims:
            continue
        pairs = corresponding_leaves(a, b)
        assert pairs is not None
        assert all(x is not y for x, y in pairs)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_blocking_reaches_all_parts(data: st.DataObject) -> None:
    """A blocked leaf stays blocked, whatever it is split into or unified with."""
    a, b = leaf(24), leaf(24)
    dim_trees.block(a, "sorted")
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["split", "cut", "unify"]))
        try:
            if kind == "unify":
                dim_trees.unify(a, b)
            else:
                _act(data, kind, data.draw(st.sampled_from([a, b])), b, [])
        except IncompatibleDims:
            continue
        assert all(x.blocked for x in dim_trees.leaves(a))
    if find(a) is find(b):
        assert all(x.blocked for x in dim_trees.leaves(b))
