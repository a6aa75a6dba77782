"""The binary variables of one mesh axis, and the cost tables over them.

There is one variable for each leaf that the axis may shard and one for each state that may be partial on it;
helpers (``OneOf``) stand for products of leaves. Variables that must be equal are joined, and those that must
be 0 are left out, before the tables go to the elimination.
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
    """The part of the problem that is the same for all mesh axes.

    Args:
        analysis: of the traced model.
        forbidden: leaves that must stay replicated.
        folded: which tensors must be treated alike, and how often a layer counts.
        sequence: leaves of activations that may be sharded although the input decides their size, see
            ``sequence_dims``.
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
        self.weighted = weighted_leaves(analysis).union(sequence)
        self.forbidden = {find(x) for node in forbidden for x in dim_trees.leaves(node)}
        self.tokens = num_tokens(analysis.tape)
        self.width = width(analysis.tape)
        self.calls = Counter(call.fqn for call in analysis.tape.calls)
        """How often each module is called."""
        self.signatures = self._signatures()
        self._corresponding: dict[tuple[Node, Node], tuple[tuple[Node, Node], ...] | None] = {}

    def may_be_sharded(self, leaf: Node) -> bool:
        """Whether no constraint but its size keeps a leaf (as ``find`` gives it) replicated.

        Positions that no parameter has stay replicated: sharding them is worth no collective, and models of
        windows and patches have so many of them that the cheapest choice would be hard to find.
        """
        if leaf.blocked or leaf in self.frozen or leaf in self.forbidden or leaf not in self.weighted:
            return False
        return not leaf.atomic or leaf in self.sequence

    def corresponding(self, a: Node, b: Node) -> tuple[tuple[Node, Node], ...] | None:
        """``corresponding_leaves`` of two dims, each pair once."""
        key = find(a), find(b)
        if key not in self._corresponding:
            pairs = corresponding_leaves(*key)
            self._corresponding[key] = None if pairs is None else tuple(dict.fromkeys(pairs))
        return self._corresponding[key]

    def _signatures(self) -> list[Signature]:
        """Those of all tensors."""
        counts = Counter(
            (tuple(find(d) for d in dims), find_partial(self.analysis.partial[tid]))
            for tid, dims in self.analysis.dims.items()
        )
        return [self._signature(dims, state, count) for (dims, state), count in counts.items()]

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
    """What tensors of the same dims and state have in common. Its leaves are those that may be sharded."""

    multiplying: tuple[Node, ...]
    """Leaves that multiply with others, in order."""
    pairs: tuple[tuple[Node, Node], ...]
    """Leaves that multiply with each other, each pair once."""
    leaves: tuple[Node, ...]
    """Of all dims, each once for each dim."""
    state: Partial
    count: int
    """How many tensors have it."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """A variable that is 1 exactly where one of some others is."""

    terms: tuple[int, ...]
    """The others, ascending."""


Key = Node | Partial | OneOf
"""The subject of a variable."""


class AxisVariables:
    """Variables and costs of one mesh axis; ``solve`` returns the cheapest choice.

    Args:
        given: the part of the problem that is the same for all mesh axes.
        extent: size of the mesh axis.
        taken: leaf -> number of parts into which earlier axes shard it.
    """

    def __init__(self, given: SolverInput, extent: int, taken: Mapping[Node, int]) -> None:
        self.given = given
        self.extent = extent
        self.taken = taken
        self.variables: dict[Key, int] = {}
        self.keys: list[Key] = []
        """By variable: its subject."""
        self.alias: list[int] = []
        """By variable: one of a lower number, or itself, that it equals."""
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
        """The variable of a leaf; None if it cannot be sharded on this axis."""
        node = find(node)
        if not self.given.may_be_sharded(node):
            return None
        if node.size < self.taken.get(node, 1) * self.extent:
            return None
        known = self.variables.get(node)
        return known if known is not None else self._new(node)

    def leaves(self, node: Node) -> list[int]:
        """The variables of the leaves of a dim."""
        return list(dict.fromkeys(v for x in dim_trees.leaves(node) if (v := self.leaf(x)) is not None))

    def state(self, state: Partial) -> int | None:
        """The variable of a partial state; None if it is never partial."""
        state = find_partial(state)
        if state.zero:
            return None
        known = self.variables.get(state)
        return known if known is not None else self._new(state)

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
        """Add ``cost`` where the variable is 1."""
        self._add((variable,), np.array([0.0, cost]))

    def _exclude(self, a: int, b: int) -> None:
        if a == b:
            self.zero.add(a)
        else:
            self._add((a, b), _NOT_BOTH)

    # Solution --------------------------------------------------------------------------------

    def solve(self) -> tuple[list[Node], list[Partial]]:
        """The leaves that are sharded and the states that are partial.

        Raises:
            Infeasible: if every choice breaks a constraint.
        """
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
        """Add a cost after fixing zeros and joining variables that are the same."""
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
