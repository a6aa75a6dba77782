"""All assignments of a tiny model, judged and priced: what the solver is compared with.

``Judge`` says what the docstrings of ``solve.py`` and ``axis_problem.py`` say, in another way: not as tables
over pairs of variables, but as conditions and sums over complete assignments. It shares with the solver the
constants of the cost and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardconv.dim_analysis.analysis import Analysis, Partial, find_partial
from shardconv.dim_analysis.dim_trees import LEAF, PRODUCT, SUM, Node, find
from shardconv.planning.mesh_axis_problem import (
    EPSILON,
    LATENCY,
    SPARE,
    STATISTIC,
    TOKENS_PER_WIDTH,
    UNEVEN,
)
from shardconv.tracing.tape import Mark

Column = NDArray[np.int8]
"""A value for each assignment."""
Condition = Callable[[], NDArray[np.bool_]]
"""Whether each assignment fulfils it."""
Variable = Node | Partial
"""A leaf that may be sharded, or a state that may be partial."""
MAX_ASSIGNMENTS = 200_000


class Judge:
    """All assignments of one mesh axis: whether each is possible, and what it costs.

    Args:
        analysis: of a model, not folded.
        extent: of the mesh axis.
        taken: leaf -> into how many parts earlier axes split it.
    """

    def __init__(self, analysis: Analysis, extent: int, taken: Mapping[Node, int]) -> None:
        self.analysis, self.tape = analysis, analysis.tape
        self.extent, self.taken = extent, taken
        self.frozen = self._frozen()
        self.keys = self._variables()
        self.touched: set[Variable] = set()
        self._set(np.zeros((1, len(self.keys)), dtype=np.int8))
        self.constraints = [*self._whole_tensors(), *self._contractions(), *self._marks(), *self._outputs()]

    def _set(self, rows: NDArray[np.int8]) -> None:
        """Look at these assignments, one in each row, of the first variables."""
        self.num = len(rows)
        self.none = np.zeros(self.num, dtype=np.int8)
        self.columns = {key: rows[:, i] for i, key in enumerate(self.keys[: rows.shape[1]])}

    @cached_property
    def possible(self) -> NDArray[np.int8] | None:
        """All assignments that mean something; None if they are too many to write out.

        Variables are added one by one, in the order of the tape; what breaks a condition is dropped as
        soon as all of its variables are there.
        """
        due = [self._due(c) for c in self.constraints]
        rows = np.zeros((1, 0), dtype=np.int8)
        for count in range(len(self.keys) + 1):
            if count:
                rows = np.vstack([np.hstack([rows, np.full((len(rows), 1), v, np.int8)]) for v in (0, 1)])
            self._set(rows)
            fine = np.ones(len(rows), bool)
            for constraint, when in zip(self.constraints, due, strict=True):
                if when == count:
                    fine &= constraint()
            rows = rows[fine]
            if len(rows) > MAX_ASSIGNMENTS:
                return None
        return rows

    def _due(self, constraint: Condition) -> int:
        """How many variables must be there before a condition can be judged."""
        self.touched = set()
        constraint()
        return max((i + 1 for i, key in enumerate(self.keys) if key in self.touched), default=0)

    def _frozen(self) -> set[Node]:
        """Leaves of inputs, and those opposite of them at marks, and so on."""
        found = {x for dim in self.analysis.frozen for x in flat_leaves(dim)}
        size = -1
        while size != len(found):
            size = len(found)
            for _, before, after in self._marked_dims():
                for x, y in opposite(before, after) or ():
                    if {x, y} & found:
                        found |= {x, y}
        return found

    def _marked_dims(self) -> Iterator[tuple[Mark, Node, Node]]:
        dims = self.analysis.dims
        for event in self.tape.events:
            if isinstance(event, Mark):
                for before, after in zip(dims[event.source], dims[event.target], strict=True):
                    yield event, before, after

    def _variables(self) -> list[Variable]:
        """Leaves that may be sharded and states that may be partial, in the order of the tape."""
        found: dict[Variable, None] = {}
        for tid, dims in self.analysis.dims.items():
            leaves = [x for d in dims for x in flat_leaves(d)]
            found |= dict.fromkeys(x for x in leaves if self._may_be_sharded(x))
            state = find_partial(self.analysis.partial[tid])
            found |= {} if state.zero else {state: None}
        for contraction in self.analysis.contractions:
            state = find_partial(contraction.output)
            found |= {} if state.zero else {state: None}
        return list(found)

    def _may_be_sharded(self, x: Node) -> bool:
        enough = x.size >= self.taken.get(x, 1) * self.extent
        return not x.blocked and x not in self.frozen and enough

    # Values of a dim or a state in every assignment ------------------------------------------------

    def leaf(self, node: Node) -> Column:
        """1 where a leaf is sharded."""
        return self._column(find(node))

    def partial(self, state: Partial) -> Column:
        """1 where a state is partial."""
        return self._column(find_partial(state))

    def _column(self, key: Variable) -> Column:
        self.touched.add(key)
        return self.columns.get(key, self.none)

    def depth(self, node: Node) -> Column:
        """How many sharded leaves multiply in a dim: more than one cannot be."""
        node = find(node)
        if node.kind == LEAF:
            return self.leaf(node) if node.size > 1 else self.none
        depths = [self.depth(c) for c in node.children]
        return sum(depths, self.none) if node.kind == PRODUCT else np.maximum.reduce(depths)

    def split(self, node: Node) -> tuple[Column, NDArray[np.bool_]]:
        """(1 where all of a dim is split, whether all or nothing is)."""
        node = find(node)
        if node.kind == LEAF:
            return self.depth(node), np.ones(self.num, bool)
        parts = [self.split(c) for c in node.children if c.size != 1 or node.kind == SUM]
        fine = np.logical_and.reduce([p[1] for p in parts])
        values = [p[0] for p in parts]
        if node.kind == PRODUCT:
            return sum(values, self.none), fine
        return values[0], fine & np.logical_and.reduce([v == values[0] for v in values])

    # Conditions ------------------------------------------------------------------------------------

    def _whole_tensors(self) -> Iterator[Condition]:
        """A tensor is split by one leaf, or partial, or neither."""
        for tid, dims in self.analysis.dims.items():
            yield lambda t=tid, d=dims: self._ways(d) + self._state(t) <= 1  # type: ignore[misc]

    def _ways(self, dims: Sequence[Node]) -> Column:
        return sum((self.depth(d) for d in dims), self.none)

    def _contractions(self) -> Iterator[Condition]:
        """The output is partial exactly where one term is: a factor, or the dim that is summed over."""
        for contraction in self.analysis.contractions:
            for dim in contraction.dims:
                yield lambda d=dim: self.split(d)[1]  # type: ignore[misc]
            yield (
                lambda c=contraction: (
                    self.partial(c.output)
                    == sum(  # type: ignore[misc]
                        [*map(self.partial, c.inputs), *(self.split(d)[0] for d in c.dims)], self.none
                    )
                )
            )

    def _marks(self) -> Iterator[Condition]:
        """Nothing becomes partial at a mark."""
        for event in self.tape.events:
            if isinstance(event, Mark):
                yield lambda e=event: self._state(e.target) <= self._state(e.source)  # type: ignore[misc]

    def _outputs(self) -> Iterator[Condition]:
        """The model's outputs are replicated."""
        for tid in self.tape.outputs:
            yield lambda t=tid: self._ways(self.analysis.dims[t]) + self._state(t) == 0  # type: ignore[misc]

    def _state(self, tid: int) -> Column:
        return self.partial(self.analysis.partial[tid])

    # Costs -----------------------------------------------------------------------------------------

    def _cost(self, worth: float) -> NDArray[np.float64]:
        """Of every assignment, in elements."""
        width = self._width()
        self.latency = LATENCY * width**2
        self.moved = (1 - 1 / self.extent) * width * TOKENS_PER_WIDTH / self._tokens(width)
        total = self.none.astype(float)
        for part in (self._moves(), self._savings(worth), self._hints(), self._ties_broken()):
            for column, price in part:
                total += column * price
        return total

    def _marked_shapes(self) -> list[tuple[int, ...]]:
        sources = [self.tape.tensors[e.source] for e in self.tape.events if isinstance(e, Mark)]
        return [t.shape for t in sources if t.shape and t.dtype.is_floating_point]

    def _width(self) -> int:
        """The last size at marks of the most elements of matrices; of two, the more frequent one."""
        sizes = [s[-1] for s in self._marked_shapes()]
        matrices = [t.shape for t in self.tape.tensors if t.kind == "parameter" and len(t.shape) > 1]
        elements = {n: sum(math.prod(shape) for shape in matrices if n in shape) for n in sizes}
        return max(dict.fromkeys(sizes), key=lambda n: (elements[n], sizes.count(n)))

    def _tokens(self, width: int) -> int:
        rows = [math.prod(s[:-1]) for s in self._marked_shapes() if s[-1] == width]
        return Counter(rows).most_common(1)[0][0]

    def _moves(self) -> Iterator[tuple[Column, float]]:
        """Partial to replicated is an all_reduce; sharded to replicated an all_gather; slicing is free."""
        for event in self.tape.events:
            if isinstance(event, Mark):
                volume = math.prod(self.tape.tensors[event.source].shape) * self.moved
                reduced = self._state(event.source) > self._state(event.target)
                yield reduced.astype(np.int8), 2 * volume + self.latency
        for event, before, after in self._marked_dims():
            gather = math.prod(self.tape.tensors[event.source].shape) * self.moved + self.latency
            yield from self._placements(before, after, gather, 100 * EPSILON * self.latency)

    def _placements(
        self, before: Node, after: Node, gather: float, cut: float
    ) -> Iterator[tuple[Column, float]]:
        pairs = opposite(before, after)
        if pairs is None:
            yield from ((self.leaf(x), gather) for x in once(flat_leaves(before)))
            yield from ((self.leaf(y), cut) for y in once(flat_leaves(after)))
            return
        for x, y in dict.fromkeys(pairs):
            yield np.maximum(self.leaf(x) - self.leaf(y), 0), gather
            yield np.maximum(self.leaf(y) - self.leaf(x), 0), cut

    def _savings(self, worth: float) -> Iterator[tuple[Column, float]]:
        """What the ranks need not hold; of uneven shares, the largest counts a little."""
        calls = Counter(call.fqn for call in self.tape.calls)
        for tid, info in enumerate(self.tape.tensors):
            if info.kind != "parameter" or tid not in self.analysis.dims:
                continue
            used = max(1, calls[info.name.rpartition(".")[0]])
            value = (TOKENS_PER_WIDTH + SPARE) * worth * used * math.prod(info.shape)
            for dim in self.analysis.dims[tid]:
                for x, share in shares(dim):
                    have = x.size / self.taken.get(x, 1)
                    largest, even = math.ceil(have / self.extent) / have, 1 / self.extent
                    yield self.leaf(x), -value * share * (1 - even - UNEVEN * (largest - even))

    def _hints(self) -> Iterator[tuple[Column, float]]:
        """Statistics of norms cost less than a collective; rows of tables first; work is better divided."""
        for norm in self.analysis.norms:
            cost = STATISTIC * self.latency
            yield from ((self.leaf(x), cost) for x in once(flat_leaves(norm.normalized)))
        for lookup in self.analysis.lookups:
            volume = math.prod(self.tape.tensors[lookup.output].shape) * self.moved
            rows = self.analysis.dims[lookup.table][0]
            yield from ((self.leaf(x), -1.1 * volume) for x in once(flat_leaves(rows)))
        for work in self.analysis.works:
            for dim in work.dims:
                yield from ((self.leaf(x), -1e-3 * self.latency) for x in once(flat_leaves(dim)))

    def _ties_broken(self) -> Iterator[tuple[Column, float]]:
        """Each tensor that is split or partial costs a trifle: reduce and gather early."""
        for tid, dims in self.analysis.dims.items():
            for dim in dims:
                yield from ((self.leaf(x), EPSILON * self.latency) for x in once(flat_leaves(dim)))
            yield self._state(tid), 10 * EPSILON * self.latency

    # Answers ---------------------------------------------------------------------------------------

    def price(self, chosen: Iterable[Variable], worth: float) -> float:
        """What the assignment that uses these leaves and states costs; infinite if it means nothing.

        Args:
            chosen: those; what is not a variable is passed over.
            worth: factor of what a split element of a parameter is worth.
        """
        wanted = set(chosen)
        self._set(np.array([[key in wanted for key in self.keys]], dtype=np.int8))
        if not all(condition()[0] for condition in self.constraints):
            return math.inf
        return float(self._cost(worth)[0])

    def best(self, worth: float) -> set[Variable]:
        """The leaves and states of the cheapest assignment, of those that can be written out."""
        assert self.possible is not None
        self._set(self.possible)
        cheapest = self.possible[int(self._cost(worth).argmin())]
        return {key for key, used in zip(self.keys, cheapest, strict=True) if used}

    def replicated(self, chosen: Iterable[Variable]) -> float:
        """Fraction of the elements of matrices of which no leaf is among these."""
        wanted = set(chosen)
        elements = {True: 0, False: 0}
        for tid, info in enumerate(self.tape.tensors):
            dims = self.analysis.dims.get(tid, ())
            if info.kind == "parameter" and len(dims) > 1:
                is_split = any(x in wanted for d in dims for x in flat_leaves(d))
                elements[is_split] += math.prod(info.shape)
        return elements[False] / sum(elements.values()) if any(elements.values()) else 0.0


def flat_leaves(node: Node) -> list[Node]:
    """Leaves of more than one position, in order."""
    node = find(node)
    if node.kind == LEAF:
        return [node] if node.size > 1 else []
    return [x for child in node.children for x in flat_leaves(child)]


def once(nodes: Iterable[Node]) -> list[Node]:
    """Each node once."""
    return list(dict.fromkeys(nodes))


def shares(node: Node, share: float = 1.0) -> Iterator[tuple[Node, float]]:
    """Leaves, each with the fraction of the dim that it is a factor of."""
    node = find(node)
    if node.kind == LEAF and node.size > 1:
        yield node, share
    for child in node.children if node.kind != LEAF else ():
        yield from shares(child, share * child.size / node.size if node.kind == SUM else share)


def shape_of(node: Node) -> tuple[object, ...]:
    """A tree as nested tuples in which products of products, and ones, are written out."""
    node = find(node)
    if node.kind == LEAF:
        return ("leaf", node.size)
    parts: list[tuple[object, ...]] = []
    name = "product" if node.kind == PRODUCT else "sum"
    for child in node.children:
        shape = shape_of(child)
        if shape[0] == name:
            parts.extend(shape[1:])  # type: ignore[arg-type]
        elif shape != ("leaf", 1) or name == "sum":
            parts.append(shape)
    return (name, *parts)


def opposite(before: Node, after: Node) -> list[tuple[Node, Node]] | None:
    """Leaves at the same positions of two trees; None if their structures differ."""
    if shape_of(before) != shape_of(after):
        return None
    return list(zip(flat_leaves(before), flat_leaves(after), strict=True))
