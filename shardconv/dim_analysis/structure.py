"""Which leaves of the trees exclude, mirror or freeze each other."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..tracing.tape import Mark, Tape, reads_and_writes, starred
from . import dim_trees
from .analysis import Analysis
from .dim_trees import LEAF, PRODUCT, SUM, Node, find


def multiplying_pairs(dims: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """Pairs of leaves of a tensor that multiply: in different dims, or different factors of one."""
    seen: list[list[Node]] = []
    for dim in dims:
        yield from _pairs_within(dim)
        here = dim_trees.leaves(dim)
        for before in seen:
            yield from ((x, y) for x in before for y in here)
        seen.append(here)


def _pairs_within(node: Node) -> Iterator[tuple[Node, Node]]:
    node = find(node)
    if node.kind == LEAF:
        return
    if node.kind == PRODUCT:
        yield from multiplying_pairs(node.children)
        return
    for child in node.children:
        yield from _pairs_within(child)


def corresponding_leaves(a: Node, b: Node) -> list[tuple[Node, Node]] | None:
    """Leaves of two trees of one structure, pairwise; None where the structures differ."""
    a, b = find(a), find(b)
    if a.kind == LEAF and b.kind == LEAF:
        return [(a, b)] if a.size == b.size and a.size > 1 else ([] if a.size == b.size else None)
    parts_a, parts_b = (dim_trees.segments(x) if x.kind == SUM else dim_trees.factors(x) for x in (a, b))
    if a.kind != b.kind or len(parts_a) != len(parts_b):
        return None
    out: list[tuple[Node, Node]] = []
    for x, y in zip(parts_a, parts_b, strict=True):
        pairs = corresponding_leaves(x, y)
        if pairs is None:
            return None
        out += pairs
    return out


def width(tape: Tape) -> int:
    """The hidden size: the last size of marked tensors that most elements of matrices have as a dim.

    Nearly every matrix reads or writes the hidden states, whatever else layers pass on (states, routers), and
    however many layers the tape was folded to.
    """
    marked = Counter(shape[-1] for shape in _marked(tape))
    elements: Counter[int] = Counter()
    for info in tape.tensors:
        if info.kind == "parameter" and len(info.shape) > 1:
            elements.update(dict.fromkeys(info.shape, math.prod(info.shape)))
    return max(marked, key=lambda size: (elements[size], marked[size]), default=1)


def num_tokens(tape: Tape) -> int:
    """How many rows of the hidden size marked tensors have: batch times sequence length.

    The number that most rows are of: many experts, with a few tokens each, do not outvote the rest.
    """
    wide = width(tape)
    rows: Counter[int] = Counter()
    for shape in _marked(tape):
        if shape[-1] == wide:
            rows[math.prod(shape[:-1])] += math.prod(shape[:-1])
    return max(1, rows.most_common(1)[0][0]) if rows else 1


def _marked(tape: Tape) -> Iterator[tuple[int, ...]]:
    """Shapes of the floating point tensors that cross a module's boundary.

    Each counts once, however often its module is called, and once for the numbered parts of one layer: a loop
    over experts does not outvote the rest.
    """
    marks = [
        (_in_layer(tape.calls[e.call].fqn), e.slots, e.source) for e in tape.events if isinstance(e, Mark)
    ]
    shapes = {(fqn, slots, tape.tensors[t].shape): tape.tensors[t].dtype for fqn, slots, t in marks}
    return (shape for (_, _, shape), dtype in shapes.items() if shape and dtype.is_floating_point)


def _in_layer(fqn: str) -> str:
    """``fqn`` with stars for all numbers but the first."""
    match = re.match(r"(.*?\b\d+\.)(.*)", fqn)
    return match[1] + starred(match[2]) if match else fqn


def frozen_leaves(analysis: Analysis) -> set[Node]:
    """The leaves of the inputs' dims and all that marks link to them."""
    return linked_leaves(analysis, analysis.frozen)


def linked_leaves(analysis: Analysis, dims: Sequence[Node]) -> set[Node]:
    """The leaves of some dims and all that marks link to them."""
    return _reached(_neighbors(analysis), (x for dim in dims for x in dim_trees.leaves(dim)))


def weighted_leaves(analysis: Analysis) -> set[Node]:
    """The leaves of parameters and of experts, and all that marks link to those of products and tables.

    The others are positions of activations: sharding them divides no parameter. A parameter that is added at
    each position may be sharded there, but not what is behind the next mark. Modules may be given parameters,
    or parts of them: one expert's matrix.
    """
    summed = {find(x) for c in analysis.contractions for dim in c.dims for x in dim_trees.leaves(dim)}
    tables = {lookup.table for lookup in analysis.lookups}
    start = {find(x) for _, count in analysis.experts for x in dim_trees.leaves(count)}
    own: set[Node] = set()
    for tid in _parameters_and_their_parts(analysis.tape) & analysis.dims.keys():
        leaves = {find(x) for dim in analysis.dims[tid] for x in dim_trees.leaves(dim)}
        own |= leaves
        if tid in tables or not summed.isdisjoint(leaves):
            start.update(x for x in leaves if not x.blocked)
    return own | _reached(_neighbors(analysis), start)


def _parameters_and_their_parts(tape: Tape) -> set[int]:
    """The tensors that are computed of parameters and of single numbers, such as that of an expert, alone."""
    found = {tid for tid, info in enumerate(tape.tensors) if info.kind == "parameter"}
    for event in tape.events:
        read, written = reads_and_writes(event)
        if not found.isdisjoint(read) and all(t in found or not tape.tensors[t].shape for t in read):
            found.update(written)
    return found


def _neighbors(analysis: Analysis) -> dict[Node, list[Node]]:
    """Leaf -> the leaves that marks link to it."""
    neighbors: dict[Node, list[Node]] = {}
    for event in analysis.tape.events:
        if isinstance(event, Mark):
            for before, after in zip(analysis.dims[event.source], analysis.dims[event.target], strict=True):
                for x, y in corresponding_leaves(before, after) or ():
                    neighbors.setdefault(x, []).append(y)
                    neighbors.setdefault(y, []).append(x)
    return neighbors


def _reached(neighbors: Mapping[Node, Sequence[Node]], start: Iterable[Node]) -> set[Node]:
    todo = list(start)
    reached: set[Node] = set()
    while todo:
        leaf = find(todo.pop())
        if leaf not in reached:
            reached.add(leaf)
            todo += neighbors.get(leaf, ())
    return reached


def differentiable(analysis: Analysis) -> set[int]:
    """The tensors that depend on a parameter in a way that has a derivative, or may have."""
    tape = analysis.tape
    found = {t for t, i in enumerate(tape.tensors) if i.kind == "parameter" and i.dtype.is_floating_point}
    for event in tape.events:
        if isinstance(event, Mark):
            if event.source in found:
                found.add(event.target)
        elif not found.isdisjoint(event.inputs):
            found.update(t for t in event.outputs if _has_gradient(analysis, t))
    return found


def _has_gradient(analysis: Analysis, tid: int) -> bool:
    dtype = analysis.tape.tensors[tid].dtype
    return dtype.is_floating_point or dtype.is_complex
