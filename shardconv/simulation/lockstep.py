"""The ranks and the unsharded model in lockstep, on weights that are read from files when they are needed.

All are threads that take turns. Before a module with parameters each says how far it has come, and whoever
has come least far goes on. So all read the weights of a module at about the same time, from files that are
cached then, and the outputs of modules are compared as the runs leave them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import torch
from shardconv_runtime.errors import ShardconvError, SolveError
from shardconv_runtime.format.dims import Dim, axes_of, leaves, size
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.slices import group_of, ranges
from shardconv_runtime.format.slot_steps import layout_of
from shardconv_runtime.parallel.build import parallelize
from shardconv_runtime.tensors.lazy_tensor import LazyTensor
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..inputs.trace_inputs import TraceInputs
from ..reporting.progress import Advance
from ..tracing.tape import Tape
from .available_memory import require_memory
from .model_runs import Precision, largest_difference, outputs_of
from .rank_simulation import Unprovable
from .rank_threads import BESIDE, ThreadCommunicator, Turn, run_ranks
from .streamed_weights import RecentReads, fill_streamed

# The first module whose output on the ranks is not that of the unsharded model.
#
# A rank may hold all of a module's output, the positions of one of its dims that some layout gives it, or a
# term of a sum over mesh axes. The plan says which only where it communicates. So every explanation is
# tried: a module differs where the shapes allow some, and the numbers agree with none. This names the place
# to look at if the model's outputs differ; by itself it is not an error.


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


assert BESIDE == UNSHARDED


@dataclass(frozen=True, slots=True)
class LockstepOutcome:
    """How the ranks compare with the unsharded model."""

    worst: float
    """Largest difference of an output of the model, relative to the largest value."""
    first: ModuleDifference | None
    """The first module whose output differs, if one does that can be compared."""


@dataclass(frozen=True, slots=True)
class Lockstep:
    """One model, its ranks, and the files that their weights are in."""

    plan: Plan
    model: nn.Module
    """Global, on meta; it is copied."""
    inputs: TraceInputs
    tape: Tape
    """Of the model with these inputs."""
    unsharded: Mapping[str, LazyTensor]
    """Weights of the unsharded model: parameters and persistent buffers, global, by FQN."""
    ranks: Sequence[Mapping[str, LazyTensor]]
    """Those of each rank, local."""

    @property
    def num_bytes(self) -> int:
        """Return the stored bytes of the weights of the unsharded model."""
        return sum(tensor.num_bytes for tensor in self.unsharded.values())

    def run(self, precision: Precision, reads: RecentReads, advance: Advance) -> LockstepOutcome:
        """Run all, and compare.

        Args:
            precision: to compute in.
            reads: reads the parameters.
            advance: told how much of ``num_bytes`` the unsharded model has come to.

        Raises:
            Unprovable: the unsharded model fails, or gives no finite number.
            SolveError: the ranks fail.
            ShardconvError: weights cannot be read or are written to, or the plan does not fit the model.
        """
        modules = ModuleOutputs(self.plan, self.tape, precision.tolerance)
        want: list[Tensor] = []

        def unsharded(turn: Turn) -> None:
            try:
                model = copy.deepcopy(self.model).to(precision.dtype)
                fill_streamed(model, self.unsharded, precision.dtype, reads)
                _tell(model, self.unsharded, advance)
                want.extend(_followed(model, turn, modules, self.inputs, precision))
            except ShardconvError:
                raise
            except Exception as error:
                require_memory(error)
                raise Unprovable(str(error)) from error
            if not all(t.isfinite().any() for t in want if t.numel()):
                raise Unprovable("an output has no finite value")

        def rank(comm: ThreadCommunicator) -> float:
            try:
                model = parallelize(copy.deepcopy(self.model).to(precision.dtype), self.plan, comm)
                fill_streamed(model, self.ranks[comm.rank], precision.dtype, reads)
                outputs = _followed(model, comm.turn, modules, self.inputs, precision)
            except ShardconvError:
                raise
            except Exception as error:
                require_memory(error)
                raise SolveError(f"the plan failed when its ranks were simulated: {error}") from error
            comm.turn.wait_for_others(len(self.tape.calls))  # the unsharded model has ended then
            return largest_difference(outputs, want)

        worst = max(run_ranks(self.plan.mesh, rank, unsharded))
        return LockstepOutcome(worst, modules.first)


def _followed(
    model: nn.Module, turn: Turn, modules: ModuleOutputs, inputs: TraceInputs, precision: Precision
) -> list[Tensor]:
    """The outputs of a model that waits for the other runs, and whose modules are compared with theirs."""
    for fqn, module in model.named_modules():
        hook = _ModuleSteps(fqn, turn, modules)
        module.register_forward_pre_hook(hook.enter, prepend=True)
        module.register_forward_hook(hook.leave)
    return outputs_of(model, inputs, precision)


def _tell(model: nn.Module, weights: Mapping[str, LazyTensor], advance: Advance) -> None:
    """Count the bytes of a module's own weights when it is called for the first time."""
    for fqn, module in model.named_modules():
        prefix = f"{fqn}." if fqn else ""
        names = [prefix + name for name in (*module._parameters, *module._buffers)]
        if num_bytes := sum(weights[name].num_bytes for name in names if name in weights):
            counted = iter([num_bytes])
            module.register_forward_pre_hook(lambda *_, counted=counted: advance(next(counted, 0)) and None)


class _ModuleSteps:
    """The hooks around the forward of one module of one run."""

    def __init__(self, fqn: str, turn: Turn, modules: ModuleOutputs) -> None:
        self._fqn = fqn
        self._turn = turn
        self._modules = modules
        self._num_calls = 0
        self._open: list[int] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: wait for those that have not come as far."""
        self._open.append(self._num_calls)
        self._num_calls += 1
        position = self._modules.positions.get((self._fqn, self._open[-1]))
        if position is not None:
            self._modules.enter(self._turn.number, position)
            if module._parameters:
                self._turn.wait_for_others(position)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: compare the output."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self._modules.leave(self._turn.number, (self._fqn, self._open.pop()), tensors)
