"""Find groups of leaves that have one size wherever they occur, and that a smaller model may shrink.

A leaf, the leaves that marks and ties link to it, and the same leaves in other calls of a module form one
**group**. A group keeps its size if the size has another meaning as well: the input determines it, code picks
positions along it by number, or a constant of the code has a value for each position.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..dim_analysis.analysis import Analysis, frozen_leaves
from ..dim_analysis.dim_trees import LEAF, Node, find, leaf, leaves
from ..dim_analysis.matrix_stacks import find_stacks
from ..dim_analysis.rules import traits_of
from ..planning.solution import stand_in
from ..tracing.tape import Mark, Op, Ref, Tape, starred, tensors_read
from .token_tables import HashedTable, hashed_tables

# Parameters and buffers that the traced call does not read get dims as well, so that they shrink with the
# others.
#
# Code may read them in another call: an expert that got no token, a second head, an embedding of masked
# states.


_STORED = ("parameter", "buffer")


def unread_parameters(tape: Tape) -> set[int]:
    """Return the parameters and buffers that no event reads."""
    read = tensors_read(tape)
    return {t for t, i in enumerate(tape.tensors) if i.kind in _STORED and t not in read}


def with_unread_parameters(analysis: Analysis, stand_ins: Mapping[str, str]) -> Analysis:
    """Add dims for unread parameters to an analysis.

    They are the dims of a parameter whose name differs only in numbers. If there is none, each size gets the
    dim of this size that has most elements of parameters.
    """
    tensors = analysis.tape.tensors
    alike: dict[tuple[str, tuple[int, ...]], tuple[Node, ...]] = {}
    for tid, dims in analysis.dims.items():
        if tensors[tid].kind in _STORED:
            alike.setdefault((_starred(tensors[tid].name), tensors[tid].shape), dims)
    inside: Counter[Node] = Counter()
    for tid, dims in analysis.dims.items():
        for dim in dims if tensors[tid].kind == "parameter" else ():
            inside[find(dim)] += math.prod(tensors[tid].shape)
    wide = {dim.size: dim for dim, _ in reversed(inside.most_common())}
    out = dict(analysis.dims)
    for tid in sorted(unread_parameters(analysis.tape) - out.keys()):
        name, shape = tensors[tid].name, tensors[tid].shape
        if stand_in(name, stand_ins) == name:
            group = alike.get((_starred(name), shape))
            out[tid] = group or tuple(wide[n] if n in wide else leaf(n) for n in shape)
    return replace(analysis, dims=out)


def _starred(name: str) -> str:
    """Replace every number in a name by a star, also within words."""
    return re.sub(r"\d+", "*", name)


_PICKING = frozenset(
    f"aten.{name}"
    for name in (
        "argmax",
        "argmin",
        "argsort",
        "gather",
        "index_add",
        "index_copy",
        "index_fill",
        "index_select",
        "kthvalue",
        "multinomial",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "select_scatter",
        "sort",
        "take_along_dim",
        "topk",
        "_grouped_mm",
    )
)
"""Operators that take or return positions along their argument ``dim``."""
_FILLING = frozenset(("aten.index_put", "aten.masked_scatter"))
"""Operators whose third argument has as many rows as a mask selects."""
_INDEXING = frozenset(("aten.index", "aten.index_put", "aten._unsafe_index"))


@dataclass(frozen=True, eq=False)
class LeafGroup:
    """Leaves of one size that shrink together."""

    size: int
    leaves: frozenset[Node]
    rows: bool = False
    """Whether they are the rows of a table that is looked up by token ids."""
    times: int = 1
    """Dims of parameters with such a leaf are at least this many times as large."""
    hashed: HashedTable | None = None
    """How the rows of a table are looked up, if they are looked up by hashes."""
    experts: bool = False
    """Whether the leaves count experts, which shrink last."""
    parameters: frozenset[str] = frozenset()
    """FQNs of the parameters that have such a leaf, with ``*`` for numbers."""

    def is_alike(self, other: LeafGroup) -> bool:
        """Return whether these are the same leaves, or the same ones of another layer."""
        return self is other or (
            self.size == other.size and bool(self.parameters) and self.parameters == other.parameters
        )


def leaf_groups(
    analysis: Analysis, ties: Sequence[tuple[int, int]], token_tables: Collection[int]
) -> list[LeafGroup]:
    """Return the groups that may shrink."""
    union = _Union()
    marks = ((e.source, e.target) for e in analysis.tape.events if isinstance(e, Mark))
    for a, b in (*marks, *ties, *analysis.repeats):
        if a in analysis.dims and b in analysis.dims and len(analysis.dims[a]) == len(analysis.dims[b]):
            for x, y in zip(analysis.dims[a], analysis.dims[b], strict=True):
                union.join_dims(x, y)
    for op in (event for event in analysis.tape.events if isinstance(event, Op)):
        base = op.base
        if traits_of(op.name).is_grouped:
            # The ends of the rows of each matrix are counts of ids, which may be computed without the scores
            # of the experts. Nothing else may link them to the stack.
            _, stack, *ends = (analysis.dims.get(t) for t in op.inputs[:3])
            if stack and ends and ends[0]:
                union.join_dims(stack[0], ends[0][0])
        if base.rstrip("_") in (_INDEXING | _FILLING):
            # Nothing else may link the last dims of rows and of the tensor that they are read from or written
            # to.
            into, dtype = analysis.dims.get(op.inputs[0]), analysis.tape.tensors[op.inputs[0]].dtype
            for tid in (*op.inputs[1:], *op.outputs):
                moved = analysis.dims.get(tid)
                if into and moved and analysis.tape.tensors[tid].dtype == dtype and dtype.is_floating_point:
                    union.join_dims(into[-1], moved[-1])
    rows = {x for table in token_tables for x in leaves(analysis.dims[table][0])}
    heads = [x for t in analysis.tape.outputs if analysis.dims[t] for x in leaves(analysis.dims[t][-1])]
    unread = [
        x for t in unread_parameters(analysis.tape) for d in analysis.dims.get(t, ()) for x in leaves(d)
    ]
    for row in rows:  # tokens are labels as well
        for other in (*heads, *rows, *unread):
            if other.size == row.size:
                union.join(row, other)
    hashed = {x: h for t, h in hashed_tables(analysis.tape).items() for x in leaves(analysis.dims[t][0])}
    # Code picks positions along dims of experts by number, but computes the numbers from scores. So these are
    # the dims that count the matrices of a stack, and the dims of scores of as many experts.
    stacks = [analysis.dims[stack.parameter][0] for stack in find_stacks(analysis.tape)]
    counts = {dim.size for dim in stacks}
    long = {x for d in analysis.dims.values() for dim in d if dim.size in counts for x in leaves(dim)}
    ops = (event for event in analysis.tape.events if isinstance(event, Op))
    experts = {x for dim in stacks for x in leaves(dim)}
    experts |= {x for op in ops for x in _picked(analysis, op) if x in long}
    roots = {union.find(x) for x in _kept(analysis, {*rows, *hashed, *experts})}
    members: dict[Node, set[Node]] = {}
    times: dict[Node, int] = {}
    names: dict[Node, set[str]] = {}
    for tid, dims in analysis.dims.items():
        for dim in dims:
            for each in leaves(dim):
                root = union.find(each)
                members.setdefault(root, set()).add(each)
                if analysis.tape.tensors[tid].kind == "parameter":
                    times[root] = min(times.get(root, dim.size), dim.size // each.size)
                    names.setdefault(root, set()).add(starred(analysis.tape.tensors[tid].name))
    rows, experts = ({union.find(x) for x in some} for some in (rows, experts))
    how = {union.find(x): h for x, h in hashed.items()}
    return [
        LeafGroup(
            root.size,
            frozenset(nodes),
            root in rows,
            times.get(root, 1),
            how.get(root),
            root in experts,
            frozenset(names.get(root, ())),
        )
        for root, nodes in members.items()
        if root not in roots
    ]


class _Union:
    """Union-find over leaves."""

    def __init__(self) -> None:
        self._parent: dict[Node, Node] = {}

    def find(self, leaf: Node) -> Node:
        root = leaf
        while root in self._parent:
            root = self._parent[root]
        while leaf is not root:
            self._parent[leaf], leaf = root, self._parent[leaf]
        return root

    def join(self, a: Node, b: Node) -> None:
        a, b = self.find(a), self.find(b)
        if a is not b:
            self._parent[a] = b

    def join_dims(self, a: Node, b: Node) -> None:
        """Join the leaves of two dims as far as they have the same structure."""
        a, b = find(a), find(b)
        if a.kind == b.kind == LEAF and a.size == b.size:
            self.join(a, b)
        elif a.kind == b.kind and [find(x).size for x in a.children] == [find(x).size for x in b.children]:
            for left, right in zip(a.children, b.children, strict=True):
                self.join_dims(left, right)


def _kept(analysis: Analysis, picked: set[Node]) -> Iterator[Node]:
    """Yield the leaves that keep their size. Code may pick positions along the leaves ``picked``."""
    tape = analysis.tape
    yield from frozen_leaves(analysis)
    for tid, dims in analysis.dims.items():
        info = tape.tensors[tid]
        if info.kind == "input" or (info.kind == "constant" and not info.name):
            yield from (x for dim in dims for x in leaves(dim))
    # Dims of activations that are as large as a dim of ids or of a mask are rows and lengths. The inputs are
    # made with sizes that no parameter has.
    counts = {
        n for t in tape.inputs if not tape.tensors[t].dtype.is_floating_point for n in tape.tensors[t].shape
    }
    stored = [t for t in analysis.dims if tape.tensors[t].kind in _STORED]
    counts -= {n for t in stored for n in tape.tensors[t].shape}
    for dims in analysis.dims.values():
        yield from (x for dim in dims for x in leaves(dim) if x.size in counts)
    for event in tape.events:
        if isinstance(event, Op):
            yield from (x for x in _picked(analysis, event) if x not in picked)
    for use in analysis.norms:
        if use.site.groups > 1:
            yield from leaves(use.groups)


def _picked(analysis: Analysis, op: Op) -> Iterable[Node]:
    """Return the leaves of the dims along which an operator takes or returns positions."""
    base = op.base
    if base.startswith("aten.conv"):
        positions = (d for t in (*op.inputs, *op.outputs) for d in analysis.dims.get(t, ())[2:])
        return [x for dim in positions for x in leaves(dim)]
    if base == "aten.embedding":
        return _leaves(analysis, op.inputs[:1], 0)
    if base == "aten.select":
        # Every dim has a position 0.
        return _leaves(analysis, op.inputs[:1], op.args[1]) if op.args[2] else ()
    if base.rstrip("_") in _INDEXING:
        indexed = [i for i, index in enumerate(op.args[1]) if index is not None]
        picked = [x for dim in indexed for x in _leaves(analysis, op.inputs[:1], dim)]
        return picked + _filling_rows(analysis, op)
    if base.rstrip("_") in _FILLING:
        return _filling_rows(analysis, op)
    if base == "aten.one_hot":
        return _leaves(analysis, op.outputs, -1)
    if base.rstrip("_") in _PICKING and op.overload is not None:
        names = [a.name for a in op.overload._schema.arguments]
        if "dim" in names:
            position = names.index("dim")
            dim = op.kwargs.get("dim", op.args[position] if position < len(op.args) else -1)
            return _leaves(analysis, (*op.inputs, *op.outputs), dim if isinstance(dim, int) else -1)
    return ()


def _filling_rows(analysis: Analysis, op: Op) -> list[Node]:
    """Return the leaves that count the rows that an operator writes: all dims but the last."""
    if op.base.rstrip("_") not in _FILLING or not isinstance(op.args[2], Ref):
        return []
    return [x for dim in analysis.dims.get(op.args[2].tid, ())[:-1] for x in leaves(dim)]


def _leaves(analysis: Analysis, tids: Iterable[int], dim: int) -> list[Node]:
    dims_of_tids = (analysis.dims.get(t, ()) for t in tids)
    return [x for dims in dims_of_tids if -len(dims) <= dim < len(dims) for x in leaves(dims[dim])]
