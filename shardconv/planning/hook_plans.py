"""Find the tensors at the ports of modules that a user's hooks may be given.

A hook expects full tensors. Ranks have them where a tensor is replicated. They can gather one that is sharded
over the sequence, and sum the terms of one. A hook of a user runs outside of the plan's steps: a pre-hook
gets the inputs in front of them, a forward hook the outputs behind them.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import HookPlan, HookPort

from ..dim_analysis.analysis import differentiable
from ..dim_analysis.dim_trees import Node, find, leaves
from ..tracing.identities import mutated_arguments
from ..tracing.tape import ALIAS_WRITE, Mark, Tape, starred
from .gradients import sequence_leaves
from .module_plans import logits_region
from .solution import Solution


def hook_plans(solution: Solution) -> tuple[HookPlan, ...]:
    """Return the modules whose inputs or outputs are the same in all calls; equal ones share an entry."""
    tape = solution.analysis.tape
    # Logits are gathered in some calls only.
    logits, written = logits_region(solution), written_later(tape)
    needed = differentiable(solution.analysis)
    sequence = sequence_leaves(solution.analysis)
    sides: dict[tuple[str, bool], dict[str, HookPort] | None] = {}
    for event in tape.events:
        if not isinstance(event, Mark):
            continue
        tid = event.target if event.is_output else event.source
        side = (solution.fqn(event), event.is_output)
        for name in event.ports:
            port = None if tid in logits else _port(solution, tid, name, sequence)
            if port is not None and tid in written and not port.is_full:
                port = replace(port, is_written=True)
            if port is not None and tape.tensors[tid].dtype.is_floating_point and tid not in needed:
                port = replace(port, has_gradient=False)
            ports = sides.setdefault(side, {})
            if ports is None or port is None or ports.setdefault(name, port) != port:
                sides[side] = None
    grouped: dict[tuple[str, HookPlan], list[str]] = {}
    for fqn in dict.fromkeys(call.fqn for call in tape.calls):
        inputs, outputs = (tuple((sides.get((fqn, is_output)) or {}).values()) for is_output in (False, True))
        if fqn and (inputs or outputs):
            for name in solution.folded.names(fqn):
                grouped.setdefault((starred(name), HookPlan((), inputs, outputs)), []).append(name)
    return tuple(
        HookPlan(tuple(compress(names)), entry.inputs, entry.outputs) for (_, entry), names in grouped.items()
    )


def _port(solution: Solution, tid: int, name: str, sequence: Set[Node]) -> HookPort | None:
    """Return how a tensor is held at a port; None if it is sharded over another dim than the sequence."""
    analysis, assignment = solution.analysis, solution.layouts.assignment
    if tid not in analysis.dims:
        return None
    dims = analysis.dims[tid]
    sequence_axes: tuple[int, ...] = ()
    if len(dims) > 1 and find(dims[1]) in sequence:
        sequence_axes = tuple(sorted(assignment.axes(find(dims[1]))))
    other_dims = dims[:1] + dims[2:] if sequence_axes else dims
    is_sharded = any(leaf.size > 1 and assignment.axes(leaf) for dim in other_dims for leaf in leaves(dim))
    if is_sharded:
        return None
    partial_axes = assignment.partial_axes(analysis.partial[tid])
    return HookPort(name, solution.gradients.axes(tid), sequence_axes, partial_axes)


def written_later(tape: Tape) -> set[int]:
    """Return the tensors to which code writes later, also under other names."""
    written: set[int] = set()
    for event in reversed(tape.events):
        if isinstance(event, Mark):
            if event.target in written:
                written.add(event.source)
        elif event.name == ALIAS_WRITE:
            written.add(event.inputs[0])
        elif event.overload is not None:
            written |= {ref.tid for ref in mutated_arguments(event.overload, event.args, event.kwargs)}
    return written
