"""Trees of tensor dims, merged by union-find and refined in place.

A dim is a leaf, a product of trees (outer to inner), or a sum of segments. If an operator needs a dim of 4096
as 32 x 128, the leaf becomes a product wherever it occurs. There are four operations: ``split`` a dim at an
inner size, ``cut`` it into segments, ``unify`` two dims, ``block`` one.

Dims on both sides of a mark are different trees with one structure: ``link`` joins them softly. Refining one
of them refines the other, but their leaves are separate, so that the solver may change the placement there.

Named dimensions with union-find follow TOAST (arXiv 2508.15010); the sums are this project's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

LEAF, PRODUCT, SUM = range(3)

Join = Callable[["Node", "Node"], None]
"""``unify`` or ``link``."""


class Node:
    """A dim, or a part of one. Use ``find`` before reading ``kind`` and ``children``."""

    __slots__ = ("atomic", "blocked", "children", "kind", "links", "parent", "size", "why")

    def __init__(self, size: int, blocked: bool = False, why: str = "") -> None:
        self.size = size
        self.kind = LEAF
        self.children: tuple[Node, ...] = ()
        self.parent: Node | None = None
        self.blocked = blocked
        self.links: dict[Node, None] = {}
        self.atomic = False
        """Whether its size comes from the input. It and all leaves linked to it stay leaves."""
        self.why = why
        """The operator that blocked it, for the report."""

    def __repr__(self) -> str:
        node = find(self)
        if node.kind == LEAF:
            return f"{node.size}{'!' if node.blocked else ''}"
        if node.kind == PRODUCT:
            return "(" + "*".join(map(repr, node.children)) + ")"
        return "[" + "|".join(map(repr, node.children)) + "]"


class IncompatibleDims(Exception):
    """Two dims, or a dim and a size, do not fit together. The caller blocks them."""


def find(node: Node) -> Node:
    """Return the representative of this node."""
    root = node
    while root.parent is not None:
        root = root.parent
    while node.parent is not None:
        node.parent, node = root, node.parent
    return root


def leaf(size: int, blocked: bool = False) -> Node:
    """Return a new dim. A dim of size 1 can never be sharded."""
    return Node(size, blocked or size <= 1)


def factors(node: Node) -> list[Node]:
    """Return the factors (leaves or sums), outer to inner, without factors of size 1."""
    node = find(node)
    if node.size == 1:
        return []
    if node.kind == PRODUCT:
        return [f for child in node.children for f in factors(child)]
    return [node]


def segments(node: Node) -> list[Node]:
    """Return the segments, which are leaves or products."""
    node = find(node)
    if node.kind == SUM:
        return [s for child in node.children for s in segments(child)]
    return [node]


def leaves(node: Node) -> list[Node]:
    """Return all leaves of size above 1, in order. A leaf may occur more than once."""
    node = find(node)
    if node.kind == LEAF:
        return [node] if node.size > 1 else []
    return [x for child in node.children for x in leaves(child)]


def product(nodes: Sequence[Node]) -> Node:
    """Return the product of dims, outer to inner."""
    parts = [f for n in nodes for f in factors(n)]
    if len(parts) == 1:
        return parts[0]
    node = Node(math.prod(p.size for p in parts))
    if not parts:
        return leaf(1)
    node.kind, node.children = PRODUCT, tuple(parts)
    return node


def concatenation(nodes: Sequence[Node]) -> Node:
    """Return the concatenation of dims."""
    parts = [s for n in nodes if n.size for s in segments(n)]
    if len(parts) == 1:
        return parts[0]
    node = Node(sum(p.size for p in parts))
    if not parts:
        return Node(0, True)
    node.kind, node.children = SUM, tuple(parts)
    return node


def block(node: Node, why: str = "") -> None:
    """Forbid to shard any leaf of this dim."""
    for item in leaves(node):
        item.blocked = True
        item.why = item.why or why


def make_atomic(node: Node) -> None:
    """Mark a leaf, and all leaves linked to it, as sized by the input, so that they are never refined."""
    todo = [find(node)]
    while todo:
        item = find(todo.pop())
        if not item.atomic and item.kind == LEAF:
            item.atomic = True
            todo += item.links


def _refine(node: Node, kind: int, children: Sequence[Node]) -> None:
    """Turn a leaf, and those linked to it, into a product or a sum."""
    assert node.kind == LEAF
    assert node.parent is None
    if node.atomic:
        raise IncompatibleDims
    node.kind, node.children = kind, tuple(children)
    if node.blocked:
        block(node, node.why)
    links, node.links = node.links, {}
    for other in links:
        link(node, other)


def split(node: Node, inner: int) -> tuple[Node, Node]:
    """Split a dim into (outer, inner) factors, the inner one of this size."""
    if node.size == 0 or node.size % inner:
        raise IncompatibleDims
    parts = factors(node)
    done = 1
    for index in range(len(parts) - 1, -1, -1):
        if done == inner:
            return product(parts[: index + 1]), product(parts[index + 1 :])
        part = find(parts[index])
        if inner % (done * part.size) == 0:
            done *= part.size
            continue
        outer_part, inner_part = _split_factor(part, inner, done)
        return product([*parts[:index], outer_part]), product([inner_part, *parts[index + 1 :]])
    if done != inner:
        raise IncompatibleDims
    return leaf(1), product(parts)


def _split_factor(part: Node, inner: int, done: int) -> tuple[Node, Node]:
    if inner % done or part.size % (inner // done):
        raise IncompatibleDims
    need = inner // done
    if part.kind == LEAF:
        pair = leaf(part.size // need), leaf(need)
        _refine(part, PRODUCT, pair)
        return pair
    # A sum whose segments share an inner factor is a product of a sum and that factor.
    parts = segments(part)
    if any(p.size % need for p in parts):
        # A sum of equal runs of segments is a product of a (blocked) count and one run.
        runs: list[Node] = []
        run: list[Node] = []
        for segment in parts:
            run.append(segment)
            total = sum(s.size for s in run)
            if total > need:
                raise IncompatibleDims
            if total == need:
                runs.append(concatenation(run))
                run = []
        for other in runs[1:]:
            unify(runs[0], other)
        count = leaf(len(runs), blocked=True)
        part.kind, part.children = PRODUCT, (count, runs[0])
        return count, runs[0]
    pairs = [split(p, need) for p in parts]
    shared = pairs[0][1]
    for _, other in pairs[1:]:
        unify(shared, other)
    outer = concatenation([p[0] for p in pairs])
    part.kind, part.children = PRODUCT, (outer, shared)
    return outer, shared


def cut(node: Node, sizes: Sequence[int]) -> list[Node]:
    """Cut a dim into consecutive segments of these sizes."""
    node = find(node)
    assert sum(sizes) == node.size
    if sum(1 for s in sizes if s) <= 1:
        return [node if s else Node(0, True) for s in sizes]
    if node.kind == SUM:
        pending = segments(node)
        out: list[list[Node]] = []
        done: list[Node] = []
        for want in sizes:
            taken: list[Node] = []
            while want:
                part = find(pending.pop(0))
                if part.size > want:
                    head, tail = cut(part, (want, part.size - want))
                    part = head
                    pending.insert(0, tail)
                want -= part.size
                taken.append(part)
            out.append(taken)
            done.extend(taken)
        if node.kind == SUM:
            node.children = tuple(done)
        return [concatenation(t) if t else Node(0, True) for t in out]
    if node.kind == LEAF:
        parts = [leaf(s) for s in sizes]
        _refine(node, SUM, [p for p in parts if p.size])
        return parts
    parts = factors(node)
    inner = math.prod(p.size for p in parts[1:])
    if any(s % inner for s in sizes):
        raise IncompatibleDims
    return [product([p, *parts[1:]]) for p in cut(parts[0], [s // inner for s in sizes])]


def unify(a: Node, b: Node) -> None:
    """Make two dims the same dim. If this is impossible, block both."""
    a, b = find(a), find(b)
    if a is b or a.size == 1 or b.size == 1:
        return
    assert a.size == b.size, f"dims of sizes {a.size} and {b.size} cannot be the same"
    if a.kind != LEAF and b.kind == LEAF:
        a, b = b, a
    if a.kind == LEAF:
        a.parent = b
        if a.blocked or (a.atomic and b.kind != LEAF):
            block(b, a.why)
        if a.atomic:
            make_atomic(b)
        links, a.links = a.links, {}
        for other in links:
            link(b, other)
        return
    try:
        _pair_up(a, b, unify)
    except IncompatibleDims:
        block(a, "it is used in two forms that do not fit together")
        block(b, "it is used in two forms that do not fit together")
        return
    a, b = find(a), find(b)
    if a is not b:
        a.parent = b


def link(a: Node, b: Node) -> None:
    """Join two dims softly: one structure, separate leaves. Nothing happens if this is impossible."""
    a, b = find(a), find(b)
    if a is b or a.size == 1 or b.size == 1:
        return
    if a.kind == LEAF and b.kind == LEAF:
        if b not in a.links:
            a.links[b] = b.links[a] = None
            if a.atomic or b.atomic:
                make_atomic(b if a.atomic else a)
        return
    if a.kind == LEAF or b.kind == LEAF:
        if b.kind == LEAF:
            a, b = b, a
        if a.atomic:
            block(b, a.why)
            return
        copy = _mirror(b, {})
        a.links[b] = None
        _refine(a, copy.kind, copy.children)
        return
    try:
        _pair_up(a, b, link)
    except IncompatibleDims:
        return


def _mirror(node: Node, made: dict[Node, Node]) -> Node:
    """Copy a tree with new leaves. A leaf that occurs twice occurs twice in the copy."""
    node = find(node)
    if node in made:
        return made[node]
    copy = made[node] = Node(node.size, node.size <= 1)
    if node.kind != LEAF:
        copy.kind = node.kind
        copy.children = tuple(_mirror(c, made) for c in node.children)
    return copy


def _pair_up(a: Node, b: Node, join: Join) -> None:
    """Refine two trees until their parts correspond, and ``join`` the parts."""
    if a.kind == SUM and b.kind == SUM:
        left, right = segments(a), segments(b)
        starts = [[0, *accumulate(s.size for s in parts)] for parts in (left, right)]
        # A segment must not be joined with a part of itself, as if a sequence is compared with its successor:
        # each cut would require another one, shifted further.
        matches = dict(zip(left, starts[0], strict=False))
        for node, start in zip(right, starts[1], strict=False):
            if 0 < abs(start - matches.get(node, start)) < node.size:
                raise IncompatibleDims
        sizes = [stop - start for start, stop in pairwise(sorted({*starts[0], *starts[1]}))]
        for x, y in zip(cut(a, sizes), cut(find(b), sizes), strict=True):
            join(x, y)
    else:
        _pair_factors(a, b, join)


def _pair_factors(a: Node, b: Node, join: Join) -> None:
    left, right = factors(a), factors(b)
    while left and right:
        x, y = find(left.pop()), find(right.pop())
        if x.size == y.size:
            if SUM in (x.kind, y.kind) and PRODUCT in (x.kind, y.kind):
                _pair_factors(x, y, join)
            else:
                join(x, y)
        elif x.size > y.size:
            outer, inner = split(x, y.size)
            left += factors(outer)
            join(inner, y)
        else:
            outer, inner = split(y, x.size)
            right += factors(outer)
            join(x, inner)
