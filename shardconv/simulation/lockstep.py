"""Run the ranks and the unsharded model in lockstep, on weights that are read from files when they are
needed.

All runs are threads that take turns. Before a module with parameters, each thread reports its position, and
the thread that is furthest behind continues. All runs thus read the weights of a module at about the same
time, while the files are cached, and the outputs of modules are compared as soon as all runs have left them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import torch
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.errors import ShardconvError, SolveError
from shardconv_runtime.format.dims import Dim, axes_of, leaves, size
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.slices import group_of, ranges
from shardconv_runtime.format.slot_steps import layout_of
from shardconv_runtime.parallel.build import parallelize
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

# Find the first module whose output on the ranks differs from the unsharded model.
#
# A rank may hold all of a module's output, the positions of one of its dims that some layout assigns to it,
# or a term of a sum over mesh axes. The plan says which one only where it communicates. So every explanation
# is tried: a module differs if the shapes allow some explanations, and the numbers agree with none. This
# shows where to look if the model's outputs differ; by itself it is not an error.


UNSHARDED = BESIDE
"""Number of the unsharded run; the ranks have the numbers from 0."""

Call = tuple[str, int]
"""FQN of a module, and the number of the call."""


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """A module whose output differs."""

    fqn: str
    worst: float
    """Difference by the explanation that fits best, relative to the largest value of the output."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """One explanation of a local tensor: a sharded dim, and the mesh axes over which it is partial."""

    dim: int
    """The sharded dim of the tensor; -1 if none is sharded."""
    held: tuple[Tensor, ...]
    """The positions that each rank holds; empty if no dim is sharded."""
    summed: tuple[int, ...]
    """Mesh axes over which the tensor is partial."""


@dataclass
class ModuleOutputs:
    """Compare the outputs of module calls as soon as all runs have left the call.

    Outputs of a call that some run leaves out are dropped when all runs have passed it.

    Args:
        plan: the plan of the ranks.
        tape: the tape of the unsharded model, for the order of the calls.
        tolerance: relative to the largest value.
    """

    plan: Plan
    tape: Tape
    tolerance: float
    first: ModuleDifference | None = None
    """The first module that differs, in the order in which the unsharded model leaves the modules."""
    _first_left: int = 0
    _held: dict[Call, dict[int, list[Tensor]]] = field(default_factory=dict)
    _left: dict[Call, int] = field(default_factory=dict)
    """The calls that the unsharded model has left, numbered in that order."""
    _entered: dict[int, int] = field(default_factory=dict)

    @cached_property
    def positions(self) -> Mapping[Call, int]:
        """Map each call of a module to the number of calls that are entered before it."""
        return {(call.fqn, call.index): i for i, call in enumerate(self.tape.calls) if call.fqn}

    def enter(self, run: int, position: int) -> None:
        """Note that a run has reached this call, and drop the outputs of calls that all runs have passed."""
        self._entered[run] = position
        if len(self._entered) > self.plan.tp:
            passed = min(self._entered.values())
            for call in [call for call in self._held if self._ends[self.positions[call]] < passed]:
                del self._held[call]

    def leave(self, run: int, call: Call, outputs: Sequence[Tensor]) -> None:
        """Note that a run has left a call with these outputs, which are local on a rank."""
        if call not in self.positions:
            return
        if run == UNSHARDED:
            self._left[call] = len(self._left)
        held = self._held.setdefault(call, {})
        held[run] = [t.clone() for t in outputs]  # code after the call may write to them
        if len(held) <= self.plan.tp:
            return
        del self._held[call]
        position = self._left[call]
        if self.first is not None and self._first_left < position:
            return
        want = held[UNSHARDED]
        ranks = [held[rank] for rank in range(self.plan.tp)]
        if any(len(local) != len(want) for local in ranks):
            return
        for index, tensor in enumerate(want):
            worst = self._difference(tensor, [local[index] for local in ranks])
            if worst > self.tolerance:
                self.first, self._first_left = ModuleDifference(call[0], worst), position
                return

    def _difference(self, want: Tensor, ranks: Sequence[Tensor]) -> float:
        """Compare by the explanation that fits best; 0 if no explanation fits the shapes or nothing is
        finite."""
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
        """Map each call of the tape to the position of the last call in it."""
        ends = list(range(len(self.tape.calls)))
        for position in range(len(ends) - 1, -1, -1):
            parent = self.tape.calls[position].parent
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[position])
        return ends

    @cached_property
    def _layouts(self) -> Mapping[int, Sequence[tuple[Dim, tuple[Tensor, ...]]]]:
        """Map sizes to the sharded dims and leaves of the plan that have them, with the positions of each
        rank."""
        steps = (step for entry in self.plan.modules for step in (*entry.inputs, *entry.outputs))
        of_parameters = (dim for entry in self.plan.parameters for dim in entry.dims)
        sharded: dict[Dim, None] = {}
        for dim in chain(of_parameters, map(layout_of, steps)):
            # A leaf of size 0 means a size that depends on the input.
            if dim is not None and all(leaf.size for leaf in leaves(dim)):
                sharded.update((part, None) for part in (dim, *leaves(dim)) if axes_of(part))
        known: dict[int, list[tuple[Dim, tuple[Tensor, ...]]]] = {}
        for layout in sharded:
            spans = [ranges(layout, self.plan.mesh, rank) for rank in range(self.plan.tp)]
            held = tuple(
                torch.tensor([i for start, stop in each for i in range(start, stop)], dtype=torch.int64)
                for each in spans
            )
            known.setdefault(size(layout), []).append((layout, held))
        return known


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(axes) + 1):
        yield from combinations(axes, count)


def _fits(shape: Sequence[int], local: Sequence[int], dim: int, held: int) -> bool:
    return len(local) == len(shape) and all(
        extent == (held if index == dim else shape[index]) for index, extent in enumerate(local)
    )


@dataclass(frozen=True, slots=True)
class LockstepOutcome:
    """How the ranks compare with the unsharded model."""

    worst: float
    """Largest difference of an output of the model, relative to its largest value."""
    first: ModuleDifference | None
    """The first module whose output can be compared and differs, if there is one."""


@dataclass(frozen=True, slots=True)
class Lockstep:
    """One model, its ranks, and the files with their weights."""

    plan: Plan
    model: nn.Module
    """The unsharded model, on meta; it is copied."""
    inputs: TraceInputs
    tape: Tape
    """The tape of the model with these inputs."""
    unsharded: Mapping[str, LazyTensor]
    """Global parameters and persistent buffers of the unsharded model, by FQN."""
    ranks: Sequence[Mapping[str, LazyTensor]]
    """Local parameters and persistent buffers of each rank, by FQN."""

    @property
    def num_bytes(self) -> int:
        """Return the stored bytes of the weights of the unsharded model."""
        return sum(tensor.num_bytes for tensor in self.unsharded.values())

    def run(self, precision: Precision, reads: RecentReads, advance: Advance) -> LockstepOutcome:
        """Run the unsharded model and all ranks, and compare them.

        Args:
            precision: the precision to compute in.
            reads: reads the parameters.
            advance: is called with the bytes of ``num_bytes`` that the unsharded model has newly used.

        Raises:
            Unprovable: if the unsharded model fails or returns no finite number.
            SolveError: if the ranks fail.
            ShardconvError: if weights cannot be read or are written to, or the plan does not fit the model.
        """
        modules = ModuleOutputs(self.plan, self.tape, precision.tolerance)
        want: list[Tensor] = []

        def unsharded(turn: Turn) -> None:
            try:
                model = copy.deepcopy(self.model).to(precision.dtype)
                fill_streamed(model, self.unsharded, precision.dtype, reads)
                # Count the bytes of a module's own weights when it is called for the first time.
                for fqn, module in model.named_modules():
                    prefix = f"{fqn}." if fqn else ""
                    names = [prefix + name for name in (*module._parameters, *module._buffers)]
                    if num_bytes := sum(self.unsharded[n].num_bytes for n in names if n in self.unsharded):
                        once = iter([num_bytes])
                        module.register_forward_pre_hook(
                            lambda *_, once=once: advance(next(once, 0)) and None
                        )
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
    """Return the outputs of a model that takes turns with the other runs, and whose modules are compared."""
    for fqn, module in model.named_modules():
        hook = _ModuleSteps(fqn, turn, modules)
        module.register_forward_pre_hook(hook.enter, prepend=True)
        module.register_forward_hook(hook.leave)
    return outputs_of(model, inputs, precision)


class _ModuleSteps:
    """Hooks around the forward of one module of one run."""

    def __init__(self, fqn: str, turn: Turn, modules: ModuleOutputs) -> None:
        self._fqn = fqn
        self._turn = turn
        self._modules = modules
        self._num_calls = 0
        self._open: list[int] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Wait for the runs that have not reached this call, as a forward pre-hook."""
        self._open.append(self._num_calls)
        self._num_calls += 1
        position = self._modules.positions.get((self._fqn, self._open[-1]))
        if position is not None:
            self._modules.enter(self._turn.number, position)
            if module._parameters:
                self._turn.wait_for_others(position)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare the output, as a forward hook."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self._modules.leave(self._turn.number, (self._fqn, self._open.pop()), tensors)
