"""The steps of one mark: what is communicated where a tensor passes the boundary of a module."""

from __future__ import annotations

from collections.abc import Collection

from shardconv_runtime.format.dims import Dim, axes_of
from shardconv_runtime.format.slot_steps import (
    AllGatherStep,
    AllReduceStep,
    Boundary,
    GradAllReduceStep,
    GradDivideStep,
    KeepOnFirstStep,
    ReduceScatterStep,
    SliceStep,
)

from ..solving.gradients import PARTIAL, REPLICATED
from ..tracing.tape import Mark
from .solution import Solution


def steps_at(solution: Solution, mark: Mark) -> list[Boundary]:
    """Reduce, then gather, then slice, or leave it to one rank: what a mark does to its tensor; none if its
    placement stays."""
    analysis, layouts = solution.analysis, solution.layouts
    width = solution.per_token(mark.source)
    out: list[Boundary] = []
    reduced, kept = solution.reduced_axes(mark), solution.kept_axes(mark)
    before_axes, after_axes = (solution.gradients.axes(t) for t in (mark.source, mark.target))
    pairs = [
        (i, layouts.open_dim(x), layouts.open_dim(y))
        for i, (x, y) in enumerate(zip(analysis.dims[mark.source], analysis.dims[mark.target], strict=True))
    ]
    changed = [(i, before, after) for i, before, after in pairs if before != after]
    gathered = [(i, before) for i, before, _ in changed if axes_of(before)]
    sliced = [(i, after) for i, _, after in changed if axes_of(after)]
    for slot in mark.slots:
        if reduced and not gathered and [axes_of(d) for _, d in sliced] == [frozenset(reduced)]:
            out.append(ReduceScatterStep(slot, *sliced[0], width))
        else:
            if reduced:
                grad_axes = _among(after_axes, reduced)
                out.append(AllReduceStep(slot, reduced, width, grad_axes))
            full = (*before_axes, *_among(after_axes, reduced))
            out += [_step(AllGatherStep, slot, *each, width, after_axes, before_axes) for each in gathered]
            out += [_step(SliceStep, slot, *each, width, full, after_axes) for each in sliced]
        if kept:
            out.append(KeepOnFirstStep(slot, kept, width))
        out += _gradient_steps(solution, mark, slot, width)
    return out


def _step(
    kind: type[AllGatherStep | SliceStep],
    slot: str,
    dim: int,
    layout: Dim,
    per_token: int,
    grad_axes: Collection[int],
    local_grad_axes: Collection[int],
) -> Boundary:
    full, local = (_among(each, axes_of(layout)) for each in (grad_axes, local_grad_axes))
    return kind(slot, dim, layout, per_token, full, local)


def _among(some: Collection[int], others: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(set(some) & set(others)))


def _gradient_steps(solution: Solution, mark: Mark, slot: str, per_token: int) -> list[Boundary]:
    """Where a tensor stays replicated, or one rank keeps it, and its gradient is partial on one side only."""
    before, after = (solution.gradients.axes(t) for t in (mark.source, mark.target))
    kept = [
        axis
        for axis in range(len(solution.layouts.mesh))
        if solution.placement(mark.source, axis) == REPLICATED
        and solution.placement(mark.target, axis) in (REPLICATED, PARTIAL)
    ]
    summed = _among([a for a in after if a not in before], kept)
    divided = _among([a for a in before if a not in after], kept)
    out: list[Boundary] = [GradAllReduceStep(slot, summed, per_token)] if summed else []
    return [*out, GradDivideStep(slot, divided)] if divided else out
