"""The first module whose output on the ranks is not that of the unsharded model.

A rank may hold all of a module's output, the positions of one of its dims that some layout gives it, or a
term of a sum over mesh axes. The plan says which only where it communicates. So every explanation is tried: a
module differs where the shapes allow some, and the numbers agree with none. This names the place to look at
if the model's outputs differ; by itself it is not an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations

import torch
from shardconv_runtime.format.dims import Dim, axes_of, leaves, size
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.slices import group_of, ranges
from shardconv_runtime.format.slot_steps import layout_of
from torch import Tensor

from ...tracing.tape import Tape
from .model_runs import largest_difference

UNSHARDED = -1
"""Number of the unsharded run beside those of the ranks."""

Call = tuple[str, int]
"""FQN of a module, and the number of the call."""


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """A module whose output differs."""

    fqn: str
    worst: float
    """Relative to the largest value of the output, by the explanation that fits best."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """One dim that is sharded, and the axes over which what a rank holds is a term of a sum."""

    dim: int
    """Of the tensor; -1 if none is sharded."""
    held: tuple[Tensor, ...]
    """For each rank, the positions that it holds; empty if no dim is sharded."""
    summed: tuple[int, ...]
    """Mesh axes."""


@dataclass
class ModuleOutputs:
    """The outputs of module calls, compared as soon as all runs have left the call.

    Outputs of a call that some run leaves out are dropped when all have passed it.

    Args:
        plan: of the ranks.
        tape: of the unsharded model: the order of the calls.
        tolerance: relative to the largest value.
    """

    plan: Plan
    tape: Tape
    tolerance: float
    first: ModuleDifference | None = None
    """The first module that differs, in the order in which the unsharded model leaves them."""
    _first_left: int = 0
    _held: dict[Call, dict[int, list[Tensor]]] = field(default_factory=dict)
    _left: dict[Call, int] = field(default_factory=dict)
    """The calls that the unsharded model has left, numbered in that order."""
    _entered: dict[int, int] = field(default_factory=dict)

    @cached_property
    def positions(self) -> Mapping[Call, int]:
        """For each call of a module in the model, how many calls are entered before it."""
        return {(call.fqn, call.index): i for i, call in enumerate(self.tape.calls) if call.fqn}

    def enter(self, run: int, position: int) -> None:
        """A run has come as far as this call."""
        self._entered[run] = position
        if len(self._entered) > self.plan.tp:
            passed = min(self._entered.values())
            for call in [call for call in self._held if self._ends[self.positions[call]] < passed]:
                del self._held[call]

    def leave(self, run: int, call: Call, outputs: Sequence[Tensor]) -> None:
        """A run has left a call with these outputs, local ones of a rank."""
        if call not in self.positions:
            return
        if run == UNSHARDED:
            self._left[call] = len(self._left)
        held = self._held.setdefault(call, {})
        held[run] = [t.clone() for t in outputs]  # code after the call may write to them
        if len(held) > self.plan.tp:
            self._compare(call, self._held.pop(call))

    def _compare(self, call: Call, held: Mapping[int, Sequence[Tensor]]) -> None:
        position = self._left[call]
        if self.first is not None and self._first_left < position:
            return
        want = held[UNSHARDED]
        ranks = [held[rank] for rank in range(self.plan.tp)]
        if any(len(outputs) != len(want) for outputs in ranks):
            return
        for index, tensor in enumerate(want):
            worst = self._difference(tensor, [outputs[index] for outputs in ranks])
            if worst > self.tolerance:
                self.first, self._first_left = ModuleDifference(call[0], worst), position
                return

    def _difference(self, want: Tensor, ranks: Sequence[Tensor]) -> float:
        """By the explanation that fits best; 0 if the shapes fit none, or there is nothing to compare."""
        if not want.is_floating_point() or not want.isfinite().any():
            return 0.0
        worst = None
        for layout in self._explanations(want.shape, [t.shape for t in ranks]):
            found = max(self._distance(want, ranks, layout, rank) for rank in range(len(ranks)))
            worst = found if worst is None else min(worst, found)
            if worst <= self.tolerance:
                break
        return worst or 0.0

    def _distance(self, want: Tensor, ranks: Sequence[Tensor], layout: _Layout, rank: int) -> float:
        members = group_of(self.plan.mesh, layout.summed, rank)
        found = torch.stack([ranks[member] for member in members]).sum(0)
        if layout.dim >= 0:
            want = want.index_select(layout.dim, layout.held[rank])
        return largest_difference([found], [want])

    def _explanations(self, shape: Sequence[int], local: Sequence[Sequence[int]]) -> Iterator[_Layout]:
        axes = range(len(self.plan.mesh))
        if all(tuple(other) == tuple(shape) for other in local):
            yield from (_Layout(-1, (), summed) for summed in _subsets(axes))
        for dim, extent in enumerate(shape):
            for layout, held in self._layouts.get(extent, ()):
                if all(_fits(shape, other, dim, len(h)) for other, h in zip(local, held, strict=True)):
                    rest = [axis for axis in axes if axis not in axes_of(layout)]
                    yield from (_Layout(dim, held, summed) for summed in _subsets(rest))

    @cached_property
    def _ends(self) -> Sequence[int]:
        """For each call of the tape, the position of the last one in it."""
        ends = list(range(len(self.tape.calls)))
        for position in range(len(ends) - 1, -1, -1):
            parent = self.tape.calls[position].parent
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[position])
        return ends

    @cached_property
    def _layouts(self) -> Mapping[int, Sequence[tuple[Dim, tuple[Tensor, ...]]]]:
        """The sharded dims that the plan knows, and their leaves, by size; the positions of each rank."""
        known: dict[int, list[tuple[Dim, tuple[Tensor, ...]]]] = {}
        for layout in dict.fromkeys(_known_dims(self.plan)):
            held = tuple(_positions(layout, self.plan, rank) for rank in range(self.plan.tp))
            known.setdefault(size(layout), []).append((layout, held))
        return known


def _known_dims(plan: Plan) -> Iterator[Dim]:
    steps = (step for entry in plan.modules for step in (*entry.inputs, *entry.outputs))
    of_parameters = (dim for entry in plan.parameters for dim in entry.dims)
    for dim in chain(of_parameters, map(layout_of, steps)):
        if dim is not None and all(leaf.size for leaf in leaves(dim)):  # else the input decides the size
            yield from (part for part in (dim, *leaves(dim)) if axes_of(part))


def _positions(layout: Dim, plan: Plan, rank: int) -> Tensor:
    spans = ranges(layout, plan.mesh, rank)
    return torch.tensor([i for start, stop in spans for i in range(start, stop)], dtype=torch.int64)


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(axes) + 1):
        yield from combinations(axes, count)


def _fits(shape: Sequence[int], local: Sequence[int], dim: int, held: int) -> bool:
    return len(local) == len(shape) and all(
        extent == (held if index == dim else shape[index]) for index, extent in enumerate(local)
    )
