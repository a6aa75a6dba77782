"""Choose where gradients are partial, and where they are summed. The choice is the cheapest one, exactly.

The forward pass is solved already. On each mesh axis, a tensor is partial, sharded or replicated. The
gradient of a partial tensor is the same on all ranks, and the gradient of a shard is complete on its rank.
The gradient of a replicated tensor may be **replicated** or **partial** (a term of a sum). It is partial
wherever the tensor meets one that is not replicated, since each rank continues with its own part. There is
one binary variable for each replicated tensor. Constraints and costs:

- an operator whose results are replicated has one state for all of its tensors; if a result is sharded or
  Partial, the operator's replicated inputs have partial gradients (``_operator``);
- at a mark, a gradient may change its state. Partial to replicated is an all_reduce (Megatron-LM's f),
  replicated to partial a division; where the forward pass communicates, the gradient takes the adjoint, which
  costs nothing or as much, depending on the states (``_mark``);
- the gradients of the model's outputs are replicated;
- a parameter with a partial gradient costs a sum over the ranks that share it (in ``__init__``).

There is always a solution: all gradients are partial, with sums at the forward reductions. This is the
adjoint of the program that all ranks run together. Sums at other places only make it cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..dim_analysis.analysis import (
    Analysis,
    Partial,
    differentiable,
    find_partial,
    linked_leaves,
    num_tokens,
    width,
)
from ..dim_analysis.dim_trees import LEAF, PRODUCT, Node, find, leaves
from ..dim_analysis.rule_builder import passive_calls
from ..tracing.fold import Folded
from ..tracing.tape import Mark
from .axis_variables import SolverInput
from .elimination import Infeasible, Problem
from .mesh_axis_problem import EPSILON, LATENCY, solve_axis
from .solve import Assignment

TOKENS_PER_WIDTH = 1.0
"""Tokens of a training step for each unit of the model's width: 8192 at a width of 8192."""

SHARDED, PARTIAL, REPLICATED = "sharded", "partial", "replicated"
PARTIALLY_SHARDED = "partially sharded"
"""States of a tensor on a mesh axis. Partially sharded means that some segments of a dim are sharded."""


@dataclass(frozen=True)
class Gradients:
    """The solution.

    Attributes:
        partial: tensor -> mesh axes over which the gradient of its replicated positions is partial.
        refusal: why there is no solution; empty if there is one.
    """

    partial: Mapping[int, tuple[int, ...]]
    refusal: str = ""

    def axes(self, tid: int) -> tuple[int, ...]:
        """Return the mesh axes over which the gradient of a tensor is partial."""
        return self.partial.get(tid, ())


def solve_gradients(
    analysis: Analysis,
    assignment: Assignment,
    folded: Folded,
    parameters: Mapping[str, tuple[int, ...]] | None = None,
) -> Gradients:
    """Return the cheapest gradient states for a solved forward pass.

    Args:
        parameters: the mesh axes over which gradients of parameters are partial, if a plan has decided it.
    """
    partial: dict[int, tuple[int, ...]] = {}
    for axis in range(len(assignment.mesh)):
        problem = _AxisGradients(analysis, assignment, folded, axis)
        for tid, info in enumerate(analysis.tape.tensors):
            if parameters is not None and info.kind == "parameter":
                problem.fix(tid, axis in parameters.get(info.name, ()))
        try:
            solved = problem.solve()
        except Infeasible:
            return Gradients(
                {}, "a gradient would be replicated and partial at once, with no module boundary between"
            )
        for tid in solved:
            partial[tid] = (*partial.get(tid, ()), axis)
    return Gradients(partial)


def placement(analysis: Analysis, assignment: Assignment, tid: int, axis: int) -> str:
    """Return the state of a tensor on a mesh axis: one of the four above."""
    if axis in assignment.partial_axes(analysis.partial[tid]):
        return PARTIAL
    return _of_product(_dim_placement(dim, assignment, axis) for dim in analysis.dims[tid])


def _of_product(parts: Iterable[str]) -> str:
    kinds = set(parts)
    return SHARDED if SHARDED in kinds else PARTIALLY_SHARDED if PARTIALLY_SHARDED in kinds else REPLICATED


def _dim_placement(node: Node, assignment: Assignment, axis: int) -> str:
    node = find(node)
    if node.kind == LEAF:
        return SHARDED if node.size > 1 and axis in assignment.axes(node) else REPLICATED
    kinds = {_dim_placement(child, assignment, axis) for child in node.children}
    if node.kind == PRODUCT:
        return _of_product(kinds)
    return kinds.pop() if len(kinds) == 1 else PARTIALLY_SHARDED


class _AxisGradients:
    """Variables, constraints and costs of one axis."""

    def __init__(self, analysis: Analysis, assignment: Assignment, folded: Folded, axis: int) -> None:
        self.analysis = analysis
        self.tape = analysis.tape
        self.folded = folded
        self.needed = differentiable(analysis)
        self.kinds = {t: placement(analysis, assignment, t, axis) for t in analysis.dims}
        """Tensor -> its state in the forward pass."""
        self.alias: dict[int, int] = {}
        """Tensor -> one with a lower number that has the same gradient state."""
        self.fixed: list[tuple[int, int]] = []
        """Tensors whose gradients are partial (1) or replicated (0)."""
        self.costs: list[tuple[tuple[int, ...], Sequence[object]]] = []
        """One or two tensors, and the cost of each assignment of their gradient states."""
        hidden = width(self.tape)
        self.latency = LATENCY * hidden**2
        self.moved = TOKENS_PER_WIDTH * hidden / num_tokens(self.tape)
        passive = passive_calls(self.tape)
        sites = {index: norm.site for norm in analysis.norms for index in norm.site.events}
        for index, event in enumerate(self.tape.events):
            if isinstance(event, Mark):
                if event.call in passive:
                    self._same((event.source, event.target))
                else:
                    self._mark(event)
            elif (site := sites.get(index)) is None:
                self._operator(event.inputs, event.outputs)
            elif index == site.events[-1]:
                self._operator((*site.inputs, *site.parameters), (site.output,))
        for tid, info in enumerate(self.tape.tensors):
            if info.kind == "parameter" and self._is_variable(tid):
                sum_cost = folded.weight(info.name) * (2 * math.prod(info.shape) + self.latency / 4)
                self.costs.append(((tid,), [0.0, sum_cost]))
        for a, b in (*folded.ties, *analysis.repeats):
            self._same((a, b))
        read = (tid for tid, reader in analysis.read_elsewhere.items() if reader.sends_gradients)
        outputs = (*self.tape.outputs, *read)
        self.fixed += [(tid, 0) for tid in outputs if self._is_variable(tid)]

    def fix(self, tid: int, is_partial: bool) -> None:
        """Decide the gradient state of a tensor, if it can have both."""
        if self._is_variable(tid):
            self.fixed.append((tid, int(is_partial)))

    def solve(self) -> list[int]:
        """Return the tensors whose gradients are partial."""
        roots = sorted({self._root(t) for t in self.kinds if self._is_variable(t)})
        number = {root: i for i, root in enumerate(roots)}
        problem = Problem(len(roots))
        for i in range(len(roots)):
            problem.add_unary(i, EPSILON * self.latency)
        for tid, value in self.fixed:
            allowed = np.array([np.inf, np.inf])
            allowed[value] = 0.0
            problem.add((number[self._root(tid)],), allowed)
        for tids, table in self.costs:
            variables = [number[self._root(t)] for t in tids]
            costs = np.array(table, dtype=float)
            if len(variables) == 2 and variables[0] == variables[1]:
                variables, costs = variables[:1], np.diagonal(costs).copy()
            problem.add(variables, costs)
        values = problem.solve()
        return [t for t in self.kinds if self._is_variable(t) and values[number[self._root(t)]]]

    # Variables -----------------------------------------------------------------------------------

    def _is_variable(self, tid: int) -> bool:
        return tid in self.needed and self.kinds.get(tid) in (REPLICATED, PARTIALLY_SHARDED)

    def _root(self, tid: int) -> int:
        while (above := self.alias.get(tid, tid)) != tid:
            tid = above
        return tid

    def _same(self, tids: Iterable[int]) -> None:
        roots = sorted({self._root(t) for t in tids if self._is_variable(t)})
        for other in roots[1:]:
            self.alias[other] = roots[0]

    # Constraints and costs -------------------------------------------------------------------------

    def _operator(self, inputs: Iterable[int], outputs: Iterable[int]) -> None:
        gradients = [t for t in outputs if t in self.kinds and t in self.needed]
        around = [t for t in (*inputs, *gradients) if self._is_variable(t)]
        if all(self.kinds[t] == REPLICATED for t in gradients):
            self._same(around)
        else:
            self.fixed += [(t, 1) for t in around]

    def _mark(self, mark: Mark) -> None:
        before, after = mark.source, mark.target
        if before not in self.needed or before not in self.kinds:
            return
        weight = self.folded.weight(self.tape.calls[mark.call].fqn)
        volume = math.prod(self.tape.tensors[before].shape) * self.moved
        move = weight * (volume + self.latency)
        reduce = weight * (2 * volume + self.latency)
        divide = 10 * EPSILON * self.latency
        change = (self.kinds[before], self.kinds[after])
        if change == (REPLICATED, REPLICATED):
            self.costs.append(((before, after), [[0.0, reduce], [divide, 0.0]]))
        elif change == (PARTIAL, REPLICATED):
            self.costs.append(((after,), [0.0, reduce]))
        elif change == (REPLICATED, PARTIAL):
            self.costs.append(((before,), [0.0, divide]))
        elif change == (SHARDED, REPLICATED):
            self.costs.append(((after,), [0.0, move]))
        elif change == (REPLICATED, SHARDED):
            self.costs.append(((before,), [move, 0.0]))
        elif change == (PARTIALLY_SHARDED, REPLICATED):
            self.costs.append(((before, after), [[0.0, move], [divide, move + divide]]))
        elif change == (REPLICATED, PARTIALLY_SHARDED):
            self.costs.append(((before, after), [[move, 2 * move], [divide, 0.0]]))
        elif change == (PARTIALLY_SHARDED, PARTIALLY_SHARDED):
            self._same((before, after))
        elif change in ((PARTIALLY_SHARDED, SHARDED), (SHARDED, PARTIALLY_SHARDED)):
            variable = before if change[0] == PARTIALLY_SHARDED else after
            self.fixed += [(variable, 0), (variable, 1)]  # no step of the runtime does that


# Sequence parallelism: solve a model again, with activations sharded over the sequence.
#
# The layouts of parameters stay. Between the parallel blocks, where norms, dropout and residuals treat each
# token separately, the sequence dim may be sharded, and the solver chooses where this begins and ends. A
# reduction becomes a reduce_scatter there, and a gather precedes each module that needs all tokens.
# (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198.)


TOKENS = "input_ids"
"""The input whose second dim is the sequence."""
SECOND_TOKENS = "decoder_input_ids"
"""An input that is another sequence, of another length."""


def sequence_leaves(analysis: Analysis) -> set[Node]:
    """Return the leaves that are the sequence and may be sharded.

    Each is a whole dim wherever it occurs, since a sharded factor of a product (batch times sequence) could
    not be gathered. If code puts images or sounds among the tokens, the dims behind it are not linked to the
    tokens' dim. Then the sequence dims of activations ``[B, S, H]`` are found by their sizes.
    """
    tape = analysis.tape
    inputs = {tape.tensors[t].name: t for t in tape.inputs}
    tokens = inputs.get(TOKENS)
    if tokens is None or len(tape.tensors[tokens].shape) != 2:
        return set()
    shape = tape.tensors[tokens].shape
    starts = [analysis.dims[tokens][1]]
    if SECOND_TOKENS in inputs:
        starts.append(analysis.dims[inputs[SECOND_TOKENS]][1])
    elif any(tape.tensors[t].shape[:2] != shape for t in tape.inputs):
        starts += [
            dims[1]
            for tid, dims in analysis.dims.items()
            if len(dims) == 3 and tape.tensors[tid].shape[:2] == shape and find(dims[1]).kind == LEAF
        ]
    linked = linked_leaves(analysis, starts)
    for dims in analysis.dims.values():
        for dim in dims:
            parts = leaves(dim)
            if find(dim) not in parts:
                linked.difference_update(find(part) for part in parts)
    return linked


def solve_sequence(
    analysis: Analysis, plain: Assignment, folded: Folded, forbidden: Iterable[Node] = ()
) -> Assignment | None:
    """Return the cheapest assignment with the given layouts of parameters and activations sharded over the
    sequence.

    Returns:
        None if no activation would be sharded.
    """
    sequence = sequence_leaves(analysis)
    problem = SolverInput(analysis, forbidden, folded, sequence)
    leaf_axes: dict[Node, tuple[int, ...]] = {}
    partial_axes: dict[Partial, tuple[int, ...]] = {}
    for axis, extent in enumerate(plain.mesh):
        taken = {leaf: math.prod(plain.mesh[a] for a in axes) for leaf, axes in leaf_axes.items()}
        try:
            sharded, partial = solve_axis(problem, extent, taken, pinned=_pinned(analysis, plain, axis))
        except Infeasible:
            return None
        for leaf in sharded:
            leaf_axes[leaf] = (*leaf_axes.get(leaf, ()), axis)
        for state in partial:
            partial_axes[state] = (*partial_axes.get(state, ()), axis)
    if sequence.isdisjoint(leaf_axes):
        return None
    return Assignment(plain.mesh, leaf_axes, partial_axes, plain.replicated)


def _pinned(analysis: Analysis, plain: Assignment, axis: int) -> dict[Node | Partial, bool]:
    """Return the leaves and states of parameters, and whether they use a mesh axis."""
    out: dict[Node | Partial, bool] = {}
    for tid, info in enumerate(analysis.tape.tensors):
        if info.kind in ("parameter", "buffer") and tid in analysis.dims:
            for dim in analysis.dims[tid]:
                out |= {find(x): axis in plain.axes(x) for x in leaves(dim)}
            state = find_partial(analysis.partial[tid])
            out[state] = axis in plain.partial_axes(state)
    return out
