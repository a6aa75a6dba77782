"""The ranks and the unsharded model in lockstep, on weights that are read from files when they are needed.

All are threads that take turns. Before a module with parameters each says how far it has come, and whoever
has come least far goes on. So all read the weights of a module at about the same time, from files that are
cached then, and the outputs of modules are compared as the runs leave them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shardconv_runtime.errors import ShardconvError, SolveError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.parallel.build import parallelize
from shardconv_runtime.tensors.lazy_tensor import LazyTensor
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...inputs.trace_inputs import TraceInputs
from ...reporting.progress import Advance
from ...tracing.tape import Tape
from .available_memory import require_memory
from .model_runs import Precision, largest_difference, outputs_of
from .module_differences import UNSHARDED, ModuleDifference, ModuleOutputs
from .rank_simulation import Unprovable
from .rank_threads import BESIDE, ThreadCommunicator, Turn, run_ranks
from .streamed_weights import RecentReads, fill_streamed

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
        """Of the weights of the unsharded model, as they are stored."""
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
