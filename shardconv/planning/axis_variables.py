"""The binary variables of one mesh axis, and the cost tables over them.

There is one variable for each leaf that the axis may shard, one for each state that may be partial on it, and
one for each product of leaves (``OneOf``). Before the elimination, variables that must be equal are joined,
and variables that must be 0 are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..dim_analysis import dim_trees
from ..dim_analysis.analysis import (
    Analysis,
    Partial,
    corresponding_leaves,
    find_partial,
    frozen_leaves,
    multiplying_pairs,
    num_tokens,
    weighted_leaves,
    width,
)
from ..dim_analysis.dim_trees import Node, find
from ..tracing.fold import Folded
from .elimination import Problem, Table

_NOT_BOTH = np.array([[0.0, 0.0], [0.0, np.inf]])


class SolverInput:
    """The part of the problem that is the same for all mesh axes."""

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
        self.weighted = weighted_leaves(analysis).union(sequence)
        self.forbidden = {find(x) for node in forbidden for x in dim_trees.leaves(node)}
        self.tokens = num_tokens(analysis.tape)
        self.width = width(analysis.tape)
        self.calls = Counter(call.fqn for call in analysis.tape.calls)
        """Number of calls of each module."""
        counts = Counter(
            (tuple(find(d) for d in dims), find_partial(analysis.partial[tid]))
            for tid, dims in analysis.dims.items()
        )
        self.signatures = [self._signature(dims, state, count) for (dims, state), count in counts.items()]
        self._corresponding: dict[tuple[Node, Node], tuple[tuple[Node, Node], ...] | None] = {}

    def may_be_sharded(self, leaf: Node) -> bool:
        """Return whether no constraint except its size keeps a leaf (a representative of ``find``)
        replicated.

        Positions that no parameter has stay replicated. Sharding them is not worth a collective, and in
        models with windows and patches their number would make the cheapest choice hard to find.
        """
        if leaf.blocked or leaf in self.frozen or leaf in self.forbidden or leaf not in self.weighted:
            return False
        return not leaf.atomic or leaf in self.sequence

    def corresponding(self, a: Node, b: Node) -> tuple[tuple[Node, Node], ...] | None:
        """Return ``corresponding_leaves`` of two dims, each pair once."""
        key = find(a), find(b)
        if key not in self._corresponding:
            pairs = corresponding_leaves(*key)
            self._corresponding[key] = None if pairs is None else tuple(dict.fromkeys(pairs))
        return self._corresponding[key]

    def _signature(self, dims: Sequence[Node], state: Partial, count: int) -> Signature:
        pairs = list(dict.fromkeys((find(x), find(y)) for x, y in multiplying_pairs(dims)))
        leaves = [x for dim in dims for x in dict.fromkeys(map(find, dim_trees.leaves(dim)))]
        return Signature(
            tuple(x for x in dict.fromkeys(x for pair in pairs for x in pair) if self.may_be_sharded(x)),
            tuple((x, y) for x, y in pairs if self.may_be_sharded(x) and self.may_be_sharded(y)),
            tuple(x for x in leaves if self.may_be_sharded(x)),
            state,
            count,
        )


@dataclass(frozen=True, slots=True)
class Signature:
    """The common properties of tensors with the same dims and state. Its leaves are those that may be
    sharded."""

    multiplying: tuple[Node, ...]
    """Leaves that multiply with others, in order."""
    pairs: tuple[tuple[Node, Node], ...]
    """Leaves that multiply with each other, each pair once."""
    leaves: tuple[Node, ...]
    """Leaves of all dims, each once for each dim."""
    state: Partial
    count: int
    """Number of tensors with this signature."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """A variable that is 1 if and only if one of some others is."""

    terms: tuple[int, ...]
    """The other variables, ascending."""


Key = Node | Partial | OneOf
"""The subject of a variable."""


class AxisVariables:
    """Variables and costs of one mesh axis. ``solve`` returns the cheapest choice."""

    def __init__(self, given: SolverInput, extent: int, taken: Mapping[Node, int]) -> None:
        self.given = given
        self.extent = extent
        self.taken = taken
        self.variables: dict[Key, int] = {}
        self.keys: list[Key] = []
        """The subject of each variable."""
        self.alias: list[int] = []
        """Variable -> one with a lower number that it equals, or itself."""
        self.zero: set[int] = set()
        """Variables that must be 0."""
        self.costs: list[tuple[tuple[int, ...], Table]] = []
        """Variables, and the cost of each of their assignments."""

    def _new(self, key: Key) -> int:
        self.keys.append(key)
        self.alias.append(len(self.alias))
        self.variables[key] = len(self.keys) - 1
        return len(self.keys) - 1

    def leaf(self, node: Node) -> int | None:
        """Return the variable of a leaf; None if it cannot be sharded on this axis."""
        node = find(node)
        if not self.given.may_be_sharded(node):
            return None
        if node.size < self.taken.get(node, 1) * self.extent:
            return None
        variable = self.variables.get(node)
        return variable if variable is not None else self._new(node)

    def leaves(self, node: Node) -> list[int]:
        """Return the variables of the leaves of a dim."""
        return list(dict.fromkeys(v for x in dim_trees.leaves(node) if (v := self.leaf(x)) is not None))

    def state(self, state: Partial) -> int | None:
        """Return the variable of a partial state; None if it is never partial."""
        state = find_partial(state)
        if state.zero:
            return None
        variable = self.variables.get(state)
        return variable if variable is not None else self._new(state)

    # Constraints -----------------------------------------------------------------------------

    def _same(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self.alias[max(a, b)] = min(a, b)

    def _root(self, v: int) -> int:
        while self.alias[v] != v:
            v = self.alias[v]
        return v

    def _add(self, variables: Sequence[int], table: Table) -> None:
        self.costs.append((tuple(variables), table))

    def _charge(self, variable: int, cost: float) -> None:
        """Add ``cost`` if the variable is 1."""
        self._add((variable,), np.array([0.0, cost]))

    def _exclude(self, a: int, b: int) -> None:
        if a == b:
            self.zero.add(a)
        else:
            self._add((a, b), _NOT_BOTH)

    # Solution --------------------------------------------------------------------------------

    def solve(self) -> tuple[list[Node], list[Partial]]:
        """Return the leaves that are sharded and the states that are partial."""
        problem = Problem(len(self.keys))
        roots = [self._root(v) for v in range(len(self.keys))]
        zero = {roots[v] for v in self.zero}
        for variables, table in self.costs:
            self._add_to(problem, [roots[v] for v in variables], table, zero)
        values = problem.solve()
        chosen = [
            key for key, root in zip(self.keys, roots, strict=True) if root not in zero and values[root]
        ]
        return (
            [key for key in chosen if isinstance(key, Node)],
            [key for key in chosen if isinstance(key, Partial)],
        )

    @staticmethod
    def _add_to(problem: Problem, variables: list[int], table: Table, zero: set[int]) -> None:
        """Add a cost after fixing zeros and joining equal variables."""
        if len(variables) == 1:
            if variables[0] not in zero:
                problem.add(variables, table)
            return
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
