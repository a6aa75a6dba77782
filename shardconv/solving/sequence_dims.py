"""Sequence parallelism: solve a model again, with activations sharded over the sequence.

The layouts of parameters stay. Between the parallel blocks, where norms, dropout and residuals treat each
token separately, the sequence dim may be sharded, and the solver chooses where this begins and ends. A
reduction becomes a reduce_scatter there, and a gather precedes each module that needs all tokens.
(Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..dim_analysis.analysis import Analysis, Partial, find_partial, linked_leaves
from ..dim_analysis.dim_trees import LEAF, Node, find, leaves
from ..tracing.fold import Folded
from .axis_variables import SolverInput
from .elimination import Infeasible
from .mesh_axis_problem import solve_axis
from .solve import Assignment

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
    found = linked_leaves(analysis, starts)
    for dims in analysis.dims.values():
        for dim in dims:
            parts = leaves(dim)
            if find(dim) not in parts:
                found.difference_update(find(part) for part in parts)
    return found


def solve_sequence(
    analysis: Analysis, plain: Assignment, folded: Folded, forbidden: Iterable[Node] = ()
) -> Assignment | None:
    """Return the cheapest assignment with the given layouts of parameters and activations sharded over the
    sequence.

    Args:
        analysis: the analysis of the traced model.
        plain: the solved model.
        folded: tensors that must get the same choice.
        forbidden: leaves that must stay replicated.

    Returns:
        None if no activation would be sharded.
    """
    sequence = sequence_leaves(analysis)
    given = SolverInput(analysis, forbidden, folded, sequence)
    leaf_axes: dict[Node, tuple[int, ...]] = {}
    partial_axes: dict[Partial, tuple[int, ...]] = {}
    for axis, extent in enumerate(plain.mesh):
        taken = {leaf: math.prod(plain.mesh[a] for a in axes) for leaf, axes in leaf_axes.items()}
        try:
            sharded, partial = solve_axis(given, extent, taken, pinned=_pinned(analysis, plain, axis))
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
