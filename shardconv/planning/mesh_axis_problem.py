"""The constraints and costs of one mesh axis as small cost tables. ``solve.py`` lists them as formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ..dim_analysis import dim_trees
from ..dim_analysis.analysis import Contraction, Partial, differentiable
from ..dim_analysis.dim_trees import LEAF, SUM, Node, find
from ..tracing.tape import Mark
from .axis_variables import AxisVariables, OneOf, Signature, SolverInput
from .elimination import Table

TOKENS_PER_WIDTH = 1 / 8
"""Tokens of a step for each unit of the model's width: 1024 at a width of 8192."""
SPARE = 3 / 16
"""Savings of an element of a sharded matrix beyond the cost of gathering its output."""
UNEVEN = 0.1
"""Weight of the elements that the largest rank holds beyond an even share. Uneven heads are better than
evenly sharded matrices that are gathered before attention."""
LATENCY = 0.4 * SPARE
"""Fixed cost of a collective, in squares of the width. Much narrower outputs are not worth a gather."""
STATISTIC = 0.75
"""Cost of the statistic of a norm, in latencies: one number per token. Between two products, a norm on shards
is better than gathers around it."""
SEQUENCE = 0.5
"""Value of an activation that is sharded over the sequence, in latencies. A norm with its surroundings is
worth more than the collective that it costs."""
EPSILON = 1e-7
"""Tie-breaker: reduce and gather as early as possible, slice as late as possible."""


@dataclass(frozen=True, slots=True)
class AxisPrices:
    """Costs of a mesh axis in seconds of a call, in place of elements."""

    tokens: int
    """Tokens of the call."""
    sent_s: float
    """Seconds of an element that is sent."""
    latency_s: float
    """Seconds of a collective without its bytes."""
    held_s: float
    """Seconds that an element of a parameter takes on each rank: it is read, or multiplied with tokens."""


def solve_axis(
    given: SolverInput,
    extent: int,
    taken: Mapping[Node, int],
    saving_weight: float = 1.0,
    pinned: Mapping[Node | Partial, bool] = MappingProxyType({}),
    prices: AxisPrices | None = None,
) -> tuple[list[Node], list[Partial]]:
    """Return the leaves that a mesh axis shards, and the states that are partial on it."""
    return AxisProblem(given, extent, taken, saving_weight, pinned, prices).solve()


class AxisProblem(AxisVariables):
    """Variables, constraints and costs of one axis."""

    def __init__(
        self,
        given: SolverInput,
        extent: int,
        taken: Mapping[Node, int],
        saving_weight: float = 1.0,
        pinned: Mapping[Node | Partial, bool] = MappingProxyType({}),
        prices: AxisPrices | None = None,
    ) -> None:
        super().__init__(given, extent, taken)
        analysis = given.analysis
        self.latency = LATENCY * given.width**2
        self.moved = (extent - 1) / extent * given.width * TOKENS_PER_WIDTH / given.tokens
        self.worth = (TOKENS_PER_WIDTH + SPARE) * saving_weight
        if prices is not None:
            self.latency = prices.latency_s
            self.moved = (extent - 1) / extent * prices.tokens / given.tokens * prices.sent_s
            self.worth = prices.held_s * saving_weight
        for contraction in analysis.contractions:
            self._contraction(contraction)
        for signature in given.signatures:
            self._exclusions(signature)
        for event in analysis.tape.events:
            if isinstance(event, Mark):
                self._mark(event)
        for tid, info in enumerate(analysis.tape.tensors):
            if info.kind == "parameter" and tid in analysis.dims:
                self._savings(tid)
        for norm in analysis.norms:  # a norm on shards reduces its statistic over the ranks
            for v in self.leaves(norm.normalized):
                self._charge(v, self._weight(norm.site.call) * STATISTIC * self.latency)
        for lookup in analysis.lookups:  # a sum over rows can be reduce-scattered, and a tied head needs rows
            volume = math.prod(analysis.tape.tensors[lookup.output].shape) * self.moved
            for v in self.leaves(analysis.dims[lookup.table][0]):
                self._charge(v, -1.1 * volume)
        for work in analysis.works:  # products are better computed in parts
            for dim in work.dims:
                for v in self.leaves(dim):
                    self._charge(v, -1e-3 * self.latency)
        for tid in (*analysis.tape.outputs, *analysis.read_elsewhere):
            self._must_be_replicated(tid)
        dims = analysis.dims
        for a, b in (*given.folded.ties, *analysis.handed_back):
            if a in dims and b in dims:
                self._tie(a, b, zip(dims[a], dims[b], strict=True))
        for a, b in analysis.repeats:  # calls of a module may have different numbers of dims
            pairs = zip(reversed(dims[a]), reversed(dims[b]), strict=False)
            self._tie(a, b, ((x, y) for x, y in pairs if x.size == y.size))
        if given.sequence:
            self._sequence()
        for key, chosen in pinned.items():
            variable = self.variables.get(key)  # None if no constraint or cost mentions it
            if variable is not None:
                self._add((variable,), np.array([np.inf, 0.0] if chosen else [0.0, np.inf]))

    def _weight(self, call: int) -> float:
        return self.given.folded.weight(self.given.analysis.tape.calls[call].fqn)

    # Constraints and costs -------------------------------------------------------------------

    def _exclusions(self, of: Signature) -> None:
        """Require s(a) + s(b) <= 1 for leaves that multiply, and s(l) + p <= 1; each that is 1 has a tiny
        cost."""
        for x in of.multiplying:
            self.leaf(x)
        for x, y in of.pairs:
            a, b = self.leaf(x), self.leaf(y)
            if a is not None and b is not None:
                self._exclude(a, b)
        variables = [v for x in of.leaves if (v := self.leaf(x)) is not None]
        partial = self.state(of.state)
        for v in variables:
            self._charge(v, EPSILON * of.count * self.latency)
            if partial is not None:
                self._exclude(v, partial)
        if partial is not None:
            self._charge(partial, 10 * EPSILON * of.count * self.latency)

    def _contraction(self, contraction: Contraction) -> None:
        """Require p(output) = sum of p(inputs) + sum of s(contracted dims) <= 1."""
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
        """Return the variable for whether a contracted dim is sharded: all segments, or none."""
        parts = [self._one_of(p) for p in dim_trees.segments(dim)]
        if any(p is None for p in parts):
            self.zero.update(v for p in dim_trees.segments(dim) for v in self.leaves(p))
            return None
        first, *rest = [p for p in parts if p is not None]
        for other in rest:
            self._same(first, other)
        return first

    def _one_of(self, part: Node) -> int | None:
        """Return the variable for whether a leaf or product is sharded."""
        terms: list[int] = []
        for factor in dim_trees.factors(part):
            v = self._all_or_none(factor) if factor.kind == SUM else self.leaf(factor)
            if v is not None:
                terms.append(v)
        if len(terms) <= 1:
            return terms[0] if terms else None
        key = OneOf(tuple(sorted(terms)))
        variable = self.variables.get(key)
        if variable is None:
            variable = self._new(key)
            self._add((variable, *terms), _either(len(terms)))
        return variable

    def _mark(self, mark: Mark) -> None:
        """Require p(after) <= p(before), except where a module returns its input.

        Each change costs an all_reduce, or an all_gather or a slice of each dim.
        """
        analysis = self.given.analysis
        weight = self._weight(mark.call)
        volume = math.prod(analysis.tape.tensors[mark.source].shape) * self.moved
        before, after = (self.state(analysis.partial[t]) for t in (mark.source, mark.target))
        if before is not None:
            reduce = weight * (2 * volume + self.latency)
            if after is None:
                self._charge(before, reduce)
            else:
                self._add((before, after), np.array([[0.0, self._keep(mark)], [reduce, 0.0]]))
            for dim in analysis.dims[mark.target]:
                scattered = self.leaf(dim) if find(dim) in self.given.sequence else None
                if scattered is not None:  # a reduce_scatter moves half as much
                    self._add((before, scattered), np.array([[0.0, 0.0], [0.0, -weight * volume]]))
        elif after is not None:
            self._add((after,), np.array([0.0, self._keep(mark)]))
        gather = weight * (volume + self.latency)
        for x, y in zip(analysis.dims[mark.source], analysis.dims[mark.target], strict=True):
            self._mark_dim(x, y, gather)

    def _keep(self, mark: Mark) -> float:
        """Return the cost of making a replicated tensor partial: one rank keeps it, others have zeros.

        It is almost free where a module returns its input, and impossible at other marks.
        """
        return 100 * EPSILON * self.latency if mark.target in self.given.analysis.returned else math.inf

    def _mark_dim(self, before: Node, after: Node, gather: float) -> None:
        """Charge ``gather`` for s(before) (1 - s(after)) of each pair of leaves. Slicing is almost free.

        Each segment of a dim is charged as if it were gathered alone: a share would invite gathers of
        some segments, whose gradients may have no solution.
        """
        pairs = self.given.corresponding(before, after)
        slice_ = 100 * EPSILON * self.latency
        if pairs is None:
            for v in self.leaves(before):
                self._charge(v, gather)
            for v in self.leaves(after):
                self._charge(v, slice_)
            return
        for x, y in pairs:
            a, b = self.leaf(x), self.leaf(y)
            if a is not None and b is not None:
                if a != b:
                    self._add((a, b), np.array([[0.0, slice_], [gather, 0.0]]))
            elif a is not None:
                self._charge(a, gather)
            elif b is not None:
                self._charge(b, slice_)

    def _savings(self, tid: int) -> None:
        """Reward a sharded parameter of N elements by w N (1 - 1/n - UNEVEN (largest share - 1/n)) s(l)."""
        dims = self.given.analysis.dims[tid]
        name = self.given.analysis.tape.tensors[tid].name
        calls = max(1, self.given.calls[name.rpartition(".")[0]])
        worth = self.worth * calls
        numel = math.prod(d.size for d in dims) * self.given.folded.weight(name)
        for dim in dims:
            for node, share in _shares(dim, 1.0):
                v = self.leaf(node)
                if v is not None:
                    have = node.size / self.taken.get(node, 1)
                    largest = math.ceil(have / self.extent) / have
                    even = 1 / self.extent
                    saved = 1 - even - UNEVEN * (largest - even)
                    self._charge(v, -worth * numel * share * saved)

    def _sequence(self) -> None:
        """Reward activations that are sharded over the sequence by more than the cost of the collectives.

        Outputs of the model are replicated in the model's own code, which computes a loss from them if there
        are labels.
        """
        problem = self.given
        tape = problem.analysis.tape
        returned = set(tape.outputs)
        for event in tape.events:
            if isinstance(event, Mark) and event.target in returned and not tape.calls[event.call].fqn:
                self._must_be_replicated(event.source)
        needed = differentiable(problem.analysis)
        for event in problem.analysis.tape.events:
            made = (event.target,) if isinstance(event, Mark) else event.outputs
            for tid in made:
                if tid in needed and tid in problem.analysis.dims:
                    for dim in problem.analysis.dims[tid]:
                        if find(dim) in problem.sequence and (v := self.leaf(dim)) is not None:
                            self._charge(v, -SEQUENCE * self._weight(event.call) * self.latency)

    def _tie(self, a: int, b: int, dims: Iterable[tuple[Node, Node]]) -> None:
        """Make the same choice for two tensors, in these pairs of their dims."""
        partial = self.given.analysis.partial
        self._tie_variables(self.state(partial[a]), self.state(partial[b]))
        for x, y in dims:
            leaves = self.given.corresponding(x, y)
            if leaves is None:
                self.zero.update([*self.leaves(x), *self.leaves(y)])
            for p, q in leaves or ():
                self._tie_variables(self.leaf(p), self.leaf(q))

    def _tie_variables(self, p: int | None, q: int | None) -> None:
        if p is not None and q is not None:
            self._same(p, q)
        else:
            self.zero.update(v for v in (p, q) if v is not None)

    def _must_be_replicated(self, tid: int) -> None:
        """Require s = p = 0."""
        analysis = self.given.analysis
        self.zero.update(v for dim in analysis.dims[tid] for v in self.leaves(dim))
        partial = self.state(analysis.partial[tid])
        if partial is not None:
            self.zero.add(partial)


def _shares(node: Node, share: float) -> Iterator[tuple[Node, float]]:
    """Yield the leaves of a dim with the fraction of the dim that each one divides."""
    node = find(node)
    if node.kind == LEAF:
        if node.size > 1:
            yield node, share
        return
    for child in node.children:
        yield from _shares(child, share * child.size / node.size if node.kind == SUM else share)


def _either(count: int) -> Table:
    """Return a table over (output, terms) in which the output is 1 if exactly one term is. Two terms are
    forbidden."""
    table = np.full((2,) * (count + 1), np.inf)
    table[(0,) * (count + 1)] = 0.0
    for i in range(count):
        table[(1, *(int(j == i) for j in range(count)))] = 0.0
    return table
