"""The choice on one mesh axis as a sum of small cost tables: constraints, costs, solution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ..dim_analysis import dim_trees as axes
from ..dim_analysis.analysis import Analysis, Contraction, Partial, TableLookup, find_partial
from ..dim_analysis.dim_trees import LEAF, SUM, Node, find
from ..dim_analysis.structure import (
    corresponding_leaves,
    differentiable,
    frozen_leaves,
    multiplying_pairs,
    num_tokens,
    width,
)
from ..tracing.fold import Folded
from ..tracing.tape import Mark
from .elimination import Problem

TOKENS_PER_WIDTH = 1 / 8
"""Tokens of a step for each unit of the model's width: 1024 at a width of 8192."""
SPARE = 3 / 16
"""What an element of a sharded matrix saves beyond the cost of gathering its output."""
UNEVEN = 0.1
"""How much of what the largest rank holds beyond an even share counts: attention by heads is worth uneven
heads, where its matrices could be split more evenly and gathered."""
LATENCY = 0.4 * SPARE
"""Fixed cost of a collective, in squares of the width: much narrower outputs are not worth a gather."""
SEQUENCE = 0.5
"""What an activation is worth that is split over the sequence, in latencies: a norm with what is around it,
more than the collective that it costs."""
EPSILON = 1e-7
"""Breaks ties: reduce and gather as early as possible, slice as late as possible."""


class Graph:
    """What does not change from axis to axis.

    Args:
        analysis: of the traced model.
        forbidden: leaves that must stay whole.
        folded: which tensors must be treated alike, and how often a layer counts.
        sequence: dims of activations that may be split although the input decides their size, see
            ``sequence``.
    """

    def __init__(
        self,
        analysis: Analysis,
        forbidden: Iterable[Node],
        folded: Folded,
        sequence: Collection[Node] = frozenset(),
    ) -> None:
        self.analysis = analysis
        self.folded = folded
        self.sequence = sequence
        self.frozen = frozen_leaves(analysis).difference(sequence)
        self.forbidden = {find(x) for node in forbidden for x in axes.leaves(node)}
        self.tokens = num_tokens(analysis.tape)
        self.width = width(analysis.tape)
        self.calls = Counter(call.fqn for call in analysis.tape.calls)
        self.signatures = self._signatures()

    def _signatures(self) -> list[tuple[tuple[Node, ...], Partial, int]]:
        """Distinct (dims, state) of tensors, with how often they occur."""
        counts = Counter(
            (tuple(find(d) for d in dims), find_partial(self.analysis.partial[tid]))
            for tid, dims in self.analysis.dims.items()
        )
        return [(dims, state, count) for (dims, state), count in counts.items()]

    def solve_axis(
        self,
        extent: int,
        taken: Mapping[Node, int],
        saving_weight: float = 1.0,
        pinned: Mapping[Node | Partial, bool] = MappingProxyType({}),
    ) -> tuple[list[Node], list[Partial]]:
        """Leaves and states that use an axis of this extent."""
        return AxisProblem(self, extent, taken, saving_weight, pinned).solve()


@dataclass(frozen=True, slots=True)
class OneOf:
    """A variable that is 1 exactly where one of some others is."""

    terms: tuple[int, ...]
    """The others, ascending."""


Key = Node | Partial | OneOf
"""What a variable decides about."""


class AxisProblem:
    """Variables, constraints and costs of one axis.

    Args:
        graph: what all axes share.
        extent: size of the mesh axis.
        taken: leaf -> into how many parts earlier axes split it.
        saving_weight: factor of what a split element of a parameter is worth.
        pinned: leaves and states of parameters whose choice is made.
    """

    def __init__(
        self,
        graph: Graph,
        extent: int,
        taken: Mapping[Node, int],
        saving_weight: float = 1.0,
        pinned: Mapping[Node | Partial, bool] = MappingProxyType({}),
    ) -> None:
        self.graph = graph
        self.extent = extent
        self.taken = taken
        self.saving_weight = saving_weight
        self.variables: dict[Key, int] = {}
        self.keys: list[Key] = []
        self.alias: list[int] = []
        self.zero: set[int] = set()
        self.costs: list[tuple[tuple[int, ...], np.ndarray]] = []
        analysis = graph.analysis
        self.latency = LATENCY * graph.width**2
        self.moved = (extent - 1) / extent * graph.width * TOKENS_PER_WIDTH / graph.tokens
        for contraction in analysis.contractions:
            self._contraction(contraction)
        for dims, state, count in graph.signatures:
            self._exclusions(dims, state, count)
        for event in analysis.tape.events:
            if isinstance(event, Mark):
                self._mark(event)
        for tid, info in enumerate(analysis.tape.tensors):
            if info.kind == "parameter" and tid in analysis.dims:
                self._savings(tid)
        for norm in analysis.norms:
            self._statistic(norm.normalised, self._weight(norm.site.call))
        for lookup in analysis.lookups:
            self._lookup(lookup)
        for work in analysis.works:
            self._reward(work.dims)
        for tid in analysis.tape.outputs:
            self._must_be_whole(tid)
        for a, b in graph.folded.ties:
            self._tie(a, b)
        for a, b in analysis.repeats:
            self._repeat(a, b)
        if graph.sequence:
            self._sequence()
        for key, chosen in pinned.items():
            self._pin(key, chosen)

    def _weight(self, call: int) -> float:
        return self.graph.folded.weight(self.graph.analysis.tape.calls[call].fqn)

    # Variables -------------------------------------------------------------------------------

    def _new(self, key: Key) -> int:
        self.keys.append(key)
        self.alias.append(len(self.alias))
        self.variables[key] = len(self.keys) - 1
        return len(self.keys) - 1

    def leaf(self, node: Node) -> int | None:
        """The variable of a leaf; None if it cannot be sharded on this axis."""
        node = find(node)
        if node.blocked or node in self.graph.frozen or node in self.graph.forbidden:
            return None
        if node.atomic and node not in self.graph.sequence:
            return None
        if node.size < self.taken.get(node, 1) * self.extent:
            return None
        known = self.variables.get(node)
        return known if known is not None else self._new(node)

    def leaves(self, node: Node) -> list[int]:
        """The variables of the leaves of a dim."""
        return list(dict.fromkeys(v for x in axes.leaves(node) if (v := self.leaf(x)) is not None))

    def state(self, state: Partial) -> int | None:
        """The variable of a partial state; None if it is never partial."""
        state = find_partial(state)
        if state.zero:
            return None
        known = self.variables.get(state)
        return known if known is not None else self._new(state)

    def _same(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self.alias[max(a, b)] = min(a, b)

    def _root(self, v: int) -> int:
        while self.alias[v] != v:
            v = self.alias[v]
        return v

    def _add(self, variables: Sequence[int], table: np.ndarray) -> None:
        self.costs.append((tuple(variables), table))

    def _charge(self, variable: int, cost: float) -> None:
        """Add ``cost`` where the variable is 1."""
        self._add((variable,), np.array([0.0, cost]))

    def _exclude(self, a: int, b: int) -> None:
        if a == b:
            self.zero.add(a)
        else:
            self._add((a, b), _BOTH)

    # Constraints and costs -------------------------------------------------------------------

    def _exclusions(self, dims: tuple[Node, ...], state: Partial, count: int) -> None:
        for x, y in multiplying_pairs(dims):
            a, b = self.leaf(x), self.leaf(y)
            if a is not None and b is not None:
                self._exclude(a, b)
        variables = [v for dim in dims for v in self.leaves(dim)]
        partial = self.state(state)
        for v in variables:
            self._charge(v, EPSILON * count * self.latency)
            if partial is not None:
                self._exclude(v, partial)
        if partial is not None:
            self._charge(partial, 10 * EPSILON * count * self.latency)

    def _contraction(self, contraction: Contraction) -> None:
        output = self.state(contraction.output)
        terms: list[int] = []
        for dim in contraction.dims:
            sharded = self._all_or_none(dim)
            if sharded is not None:
                terms.append(sharded)
        terms += [v for p in contraction.inputs if (v := self.state(p)) is not None]
        self.zero.update(v for v in terms if terms.count(v) > 1)
        terms = list(dict.fromkeys(terms))
        if output is None:
            self.zero.update(terms)
        elif not terms:
            self.zero.add(output)
        elif len(terms) == 1:
            self._same(output, terms[0])
        else:
            self._add((output, *terms), _either(len(terms)))

    def _all_or_none(self, dim: Node) -> int | None:
        """The variable that says whether a contracted dim is sharded: every segment, or none."""
        parts = [self._one_of(p) for p in axes.segments(dim)]
        if any(p is None for p in parts):
            self.zero.update(v for p in axes.segments(dim) for v in self.leaves(p))
            return None
        first, *rest = [p for p in parts if p is not None]
        for other in rest:
            self._same(first, other)
        return first

    def _one_of(self, part: Node) -> int | None:
        """The variable that says whether a leaf or product is sharded."""
        terms: list[int] = []
        for factor in axes.factors(part):
            v = self._all_or_none(factor) if factor.kind == SUM else self.leaf(factor)
            if v is not None:
                terms.append(v)
        if len(terms) <= 1:
            return terms[0] if terms else None
        key = OneOf(tuple(sorted(terms)))
        known = self.variables.get(key)
        if known is None:
            known = self._new(key)
            self._add((known, *terms), _either(len(terms)))
        return known

    def _mark(self, mark: Mark) -> None:
        analysis = self.graph.analysis
        weight = self._weight(mark.call)
        volume = math.prod(analysis.tape.tensors[mark.source].shape) * self.moved
        before, after = (self.state(analysis.partial[t]) for t in (mark.source, mark.target))
        if before is not None:
            reduce = weight * (2 * volume + self.latency)
            if after is None:
                self._charge(before, reduce)
            else:
                self._add((before, after), np.array([[0.0, np.inf], [reduce, 0.0]]))
            for dim in analysis.dims[mark.target]:
                scattered = self.leaf(dim) if find(dim) in self.graph.sequence else None
                if scattered is not None:  # a reduce_scatter moves half as much
                    self._add((before, scattered), np.array([[0.0, 0.0], [0.0, -weight * volume]]))
        elif after is not None:
            self.zero.add(after)
        gather = weight * (volume + self.latency)
        for x, y in zip(analysis.dims[mark.source], analysis.dims[mark.target], strict=True):
            self._mark_dim(x, y, gather)

    def _mark_dim(self, before: Node, after: Node, gather: float) -> None:
        pairs = corresponding_leaves(before, after)
        slice_ = 100 * EPSILON * self.latency
        if pairs is None:
            for v in self.leaves(before):
                self._charge(v, gather)
            for v in self.leaves(after):
                self._charge(v, slice_)
            return
        for x, y in dict.fromkeys(pairs):
            a, b = self.leaf(x), self.leaf(y)
            if a is not None and b is not None:
                if a != b:
                    self._add((a, b), np.array([[0.0, slice_], [gather, 0.0]]))
            elif a is not None:
                self._charge(a, gather)
            elif b is not None:
                self._charge(b, slice_)

    def _savings(self, tid: int) -> None:
        dims = self.graph.analysis.dims[tid]
        name = self.graph.analysis.tape.tensors[tid].name
        calls = max(1, self.graph.calls[name.rpartition(".")[0]])
        worth = (TOKENS_PER_WIDTH + SPARE) * self.saving_weight * calls
        numel = math.prod(d.size for d in dims) * self.graph.folded.weight(name)
        for dim in dims:
            for node, share in _shares(dim, 1.0):
                v = self.leaf(node)
                if v is not None:
                    have = node.size / self.taken.get(node, 1)
                    largest = math.ceil(have / self.extent) / have
                    even = 1 / self.extent
                    saved = 1 - even - UNEVEN * (largest - even)
                    self._charge(v, -worth * numel * share * saved)

    def _statistic(self, dim: Node, weight: float) -> None:
        for v in self.leaves(dim):
            self._charge(v, weight * self.latency)

    def _lookup(self, lookup: TableLookup) -> None:
        """Rows before columns: what is summed can be reduce-scattered, and a tied head needs rows."""
        analysis = self.graph.analysis
        volume = math.prod(analysis.tape.tensors[lookup.output].shape) * self.moved
        for v in self.leaves(analysis.dims[lookup.table][0]):
            self._charge(v, -1.1 * volume)

    def _sequence(self) -> None:
        """Activations that are split over the sequence, for what is worth more than the collectives."""
        graph = self.graph
        needed = differentiable(graph.analysis)
        for event in graph.analysis.tape.events:
            made = (event.target,) if isinstance(event, Mark) else event.outputs
            for tid in made:
                if tid in needed and tid in graph.analysis.dims:
                    for dim in graph.analysis.dims[tid]:
                        if find(dim) in graph.sequence and (v := self.leaf(dim)) is not None:
                            self._charge(v, -SEQUENCE * self._weight(event.call) * self.latency)

    def _pin(self, key: Node | Partial, chosen: bool) -> None:
        variable = self.variables.get(key)
        if variable is not None:
            self._add((variable,), np.array([np.inf, 0.0] if chosen else [0.0, np.inf]))

    def _reward(self, dims: Sequence[Node]) -> None:
        for dim in dims:
            for v in self.leaves(dim):
                self._charge(v, -1e-3 * self.latency)

    def _tie(self, a: int, b: int) -> None:
        """Corresponding tensors of layers of one kind: the same choice."""
        dims = self.graph.analysis.dims
        if a in dims and b in dims:
            self._tie_states(a, b)
            for x, y in zip(dims[a], dims[b], strict=True):
                self._tie_dims(x, y)

    def _repeat(self, a: int, b: int) -> None:
        """Tensors at one place of a module that is called more than once: the same choice."""
        dims = self.graph.analysis.dims
        self._tie_states(a, b)
        for x, y in zip(reversed(dims[a]), reversed(dims[b]), strict=False):
            if x.size == y.size:
                self._tie_dims(x, y)

    def _tie_states(self, a: int, b: int) -> None:
        partial = self.graph.analysis.partial
        self._tie_variables(self.state(partial[a]), self.state(partial[b]))

    def _tie_dims(self, x: Node, y: Node) -> None:
        leaves = corresponding_leaves(x, y)
        if leaves is None:
            self.zero.update([*self.leaves(x), *self.leaves(y)])
            return
        for p, q in leaves:
            self._tie_variables(self.leaf(p), self.leaf(q))

    def _tie_variables(self, p: int | None, q: int | None) -> None:
        if p is not None and q is not None:
            self._same(p, q)
        else:
            self.zero.update(v for v in (p, q) if v is not None)

    def _must_be_whole(self, tid: int) -> None:
        analysis = self.graph.analysis
        self.zero.update(v for dim in analysis.dims[tid] for v in self.leaves(dim))
        partial = self.state(analysis.partial[tid])
        if partial is not None:
            self.zero.add(partial)

    # Solution --------------------------------------------------------------------------------

    def solve(self) -> tuple[list[Node], list[Partial]]:
        """The leaves that are sharded and the states that are partial."""
        problem = Problem(len(self.keys))
        zero = {self._root(v) for v in self.zero}
        for variables, table in self.costs:
            self._add_to(problem, [self._root(v) for v in variables], table, zero)
        values = problem.solve()
        roots = [self._root(v) for v in range(len(self.keys))]
        chosen = [
            key for key, root in zip(self.keys, roots, strict=True) if root not in zero and values[root]
        ]
        return (
            [key for key in chosen if isinstance(key, Node)],
            [key for key in chosen if isinstance(key, Partial)],
        )

    @staticmethod
    def _add_to(problem: Problem, variables: list[int], table: np.ndarray, zero: set[int]) -> None:
        """Add a cost after fixing zeros and joining variables that are the same."""
        names = list(dict.fromkeys(v for v in variables if v not in zero))
        if not names:
            return
        if names == variables:
            problem.add(variables, table)
            return
        reduced = np.empty((2,) * len(names))
        for index in np.ndindex(*reduced.shape):
            value = dict(zip(names, index, strict=True))
            reduced[index] = table[tuple(value.get(v, 0) for v in variables)]
        problem.add(names, reduced)


def _shares(node: Node, share: float) -> Iterator[tuple[Node, float]]:
    """The leaves of a dim with the fraction of the dim that each one divides."""
    node = find(node)
    if node.kind == LEAF:
        if node.size > 1:
            yield node, share
        return
    for child in node.children:
        yield from _shares(child, share * child.size / node.size if node.kind == SUM else share)


_BOTH = np.array([[0.0, 0.0], [0.0, np.inf]])


def _either(count: int) -> np.ndarray:
    """Table over (output, terms): output is 1 exactly where one term is; never two."""
    table = np.full((2,) * (count + 1), np.inf)
    table[(0,) * (count + 1)] = 0.0
    for i in range(count):
        table[(1, *(int(j == i) for j in range(count)))] = 0.0
    return table
