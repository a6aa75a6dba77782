"""The simulated ranks of a plan, compared with the unsharded model on the same weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import PlanError, ShardconvError, SolveError, SourceError
from shardconv_runtime.format.dims import axes_of, size
from shardconv_runtime.format.plan import AllGatherStep, Plan, module_plans, parameter_plans
from shardconv_runtime.format.slices import ranges
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from shardconv_runtime.training.prepare import parallelize_for_training
from shardconv_runtime.training.sequence import attach_sequence
from torch import Tensor, nn

from ...tracing.inputs import TraceInputs
from .model_runs import (
    PRECISIONS,
    ModelRun,
    Precision,
    gradients_of,
    largest_difference,
    outputs_of,
    with_gradients,
)
from .rank_threads import run_ranks
from .simulated_weights import Weights, fill, local_weights


class Unprovable(SolveError):
    """The unsharded model itself fails on the weights."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the simulated ranks compare with the unsharded model."""

    worst: float
    """Largest difference of an output, relative to the largest value."""
    tolerance: float
    dtype: torch.dtype
    """That both were run in."""
    gradients: str | None = None
    """What is wrong with the gradients; empty if nothing is, None if they were not compared."""

    @property
    def agrees(self) -> bool:
        """Whether the difference is one of rounding."""
        return self.worst <= self.tolerance


class Simulation:
    """One model, one plan: the unsharded run and that of each rank, on the same weights.

    Args:
        plan: the plan to prove.
        model: the global model, on meta; it is copied.
        inputs: of its calls.
        weights: of both sides.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        inputs: TraceInputs,
        weights: Weights,
    ) -> None:
        self.plan = plan
        self.model = model
        self.inputs = inputs
        self.weights = weights
        self.entries = parameter_plans(plan)

    def run(self, gradients: bool = False, *, calls: int = 1) -> Outcome:
        """Run the unsharded model, then all ranks.

        Args:
            gradients: run backward as well, from a random gradient of everything that the model returns.
            calls: 2: call the model again with what it hands back, if the unsharded model can be.

        Raises:
            Unprovable: the unsharded model fails.
            SolveError: the ranks fail.
            ShardconvError: weights cannot be read, or the plan does not fit the model.
        """
        precision, want, problem = self._reference(gradients)
        gradients = gradients and not problem
        second = self._second_call(precision) if calls > 1 else None
        try:
            worst = max(
                run_ranks(self.plan.mesh, lambda comm: self._distance(comm, precision, want.outputs, second))
            )
        except (PlanError, SourceError):
            raise
        except Exception as error:
            raise SolveError(f"the plan failed when its ranks were simulated: {error}") from error
        if gradients:
            problem = self._wrong_gradient(precision, want.gradients)
        return Outcome(worst, precision.tolerance, precision.dtype, problem)

    def run_unsharded(self) -> list[Tensor]:
        """The outputs of the unsharded model.

        Raises:
            Unprovable: it fails.
        """
        return self._reference(False)[1].outputs

    def agrees_when_padded(self) -> bool:
        """Whether the unsharded model computes the same for each token with padding at the end as without it.

        Raises:
            Unprovable: the unsharded model fails.
        """
        precision, want, _ = self._reference(False)
        padded = self._unsharded(precision, False)
        length = self.inputs.tensors["input_ids"].shape[1]
        attach_sequence(padded, next(n for n in (4, 3, 5, 7, 11) if length % n))
        try:
            found = outputs_of(padded, self.inputs, precision)
        except ShardconvError:
            return False  # an argument that cannot be padded
        return largest_difference(found, want.outputs) <= precision.tolerance

    def _wrong_gradient(self, precision: Precision, want: Mapping[str, Tensor]) -> str:
        """What is wrong with the gradients of the ranks, in training mode; empty if nothing is."""
        try:
            found = run_ranks(self.plan.mesh, lambda comm: self._gradient_distance(comm, precision, want))
        except Exception as error:
            return f"in training mode a rank fails, the unsharded model does not: {shorten(str(error), 200)}"
        return max(found).text(precision.tolerance)

    def needed_bytes(self) -> int:
        """Float64 copies of the unsharded model and of all ranks."""
        total = 0
        for entry in self.entries.values():
            numel = math.prod(size(d) for d in entry.dims)
            num_shards = math.prod(self.plan.mesh[a] for a in {a for d in entry.dims for a in axes_of(d)})
            total += 8 * numel * (1 + self.plan.tp // num_shards)
        return total

    def _reference(self, gradients: bool) -> tuple[Precision, ModelRun, str | None]:
        """The unsharded run in the best precision that the model supports, and problems of its gradients."""
        problem: Exception | None = None
        for precision in PRECISIONS:
            model = self._unsharded(precision, gradients)
            try:
                want = outputs_of(model, self.inputs, precision)
                if not all(t.isfinite().any() for t in want if t.numel()):
                    problem = problem or ArithmeticError("an output has no finite value")
                elif not gradients:
                    return precision, ModelRun(want), None
                else:
                    return precision, *with_gradients(model, self.inputs, precision, want)
            except Exception as error:
                problem = problem or error.with_traceback(None)  # which would keep the weights in memory
        raise Unprovable(str(problem)) from problem

    def _second_call(self, precision: Precision) -> list[Tensor] | None:
        """What the unsharded model returns in two calls; None if it cannot be called again."""
        try:
            return outputs_of(self._unsharded(precision, False), self.inputs, precision, calls=2)
        except Exception:  # whatever its code raises on a call that its author did not think of
            return None

    def _unsharded(self, precision: Precision, gradients: bool) -> nn.Module:
        """The unsharded model with its weights."""
        model = copy.deepcopy(self.model).to(precision.dtype)
        values = self.weights.unsharded({n: t for n, t in stored_tensors(model) if n in self.entries})
        return fill(model, values, gradients)

    def _distance(
        self, comm: Communicator, precision: Precision, want: list[Tensor], second: list[Tensor] | None
    ) -> float:
        """How far one rank is from ``want``, with gathered logits and with its own shard of them.

        Args:
            comm: the rank.
            precision: to compute in.
            want: of one call.
            second: of two calls, which are compared in place of one with gathered logits; None: of one alone.
        """
        weights = self.weights.local(comm.rank)
        gathering = self._rank(comm, precision, weights)
        calls = 1 if second is None else 2
        worst = largest_difference(outputs_of(gathering, self.inputs, precision, calls=calls), second or want)
        if self.plan.logits is None or "labels" in self.inputs.tensors:
            return worst
        own = self._rank(comm, precision, weights, gather_logits=False)
        found = outputs_of(own, self.inputs, precision)
        return max(worst, largest_difference(found, self._with_own_logits(want, comm.rank)))

    def _gradient_distance(
        self, comm: Communicator, precision: Precision, want: Mapping[str, Tensor]
    ) -> _GradientDifference:
        """How far the gradients of one rank are from ``want``."""
        model = self._rank(comm, precision, self.weights.local(comm.rank), training=True)
        found = gradients_of(model, self.inputs, precision)
        return self._compare_gradients(found, want, comm.rank)

    def _rank(
        self,
        comm: Communicator,
        precision: Precision,
        weights: Mapping[str, Tensor],
        *,
        gather_logits: bool = True,
        training: bool = False,
    ) -> nn.Module:
        """The model of one rank."""
        model = copy.deepcopy(self.model).to(precision.dtype)
        make = parallelize_for_training if training else parallelize
        local = make(model, self.plan, comm, gather_logits)
        return fill(local, weights, training)

    def _compare_gradients(
        self, got: Mapping[str, Tensor], want: Mapping[str, Tensor], rank: int
    ) -> _GradientDifference:
        """The worst parameter of a rank.

        Differences are relative to the largest gradient of the parameter; where that is tiny beside those of
        other parameters (zero, but for rounding), to a fraction of theirs.
        """
        largest = max((float(g.abs().max()) for g in want.values() if g.numel()), default=0.0)
        worst = _GradientDifference(0.0, "")
        local = local_weights(want, self.plan, rank)
        for name, mine in local.items():
            found = got.get(name, torch.zeros_like(mine))
            least = (1e-4 if mine.dtype == torch.float64 else 1e-2) * largest
            scale = max(float(want[name].abs().max()) if mine.numel() else 0.0, least, 1e-30)
            error = float((found - mine).abs().max()) / scale if mine.numel() else 0.0
            worst = max(worst, _GradientDifference(error if error == error else math.inf, name))
        return worst

    def _with_own_logits(self, want: list[Tensor], rank: int) -> list[Tensor]:
        """The model's outputs, of the logits (the first one) only those that the rank computes."""
        logits = self.plan.logits
        assert logits is not None
        steps = module_plans(self.plan)[logits.module].outputs
        layout = next(s.layout for s in steps if isinstance(s, AllGatherStep) and s.slot == logits.slot)
        held = torch.tensor([i for a, b in ranges(layout, self.plan.mesh, rank) for i in range(a, b)])
        index = next(i for i, t in enumerate(want) if t.shape[-1:] == (size(layout),))
        return [*want[:index], want[index].index_select(-1, held.long()), *want[index + 1 :]]


@dataclass(frozen=True, order=True)
class _GradientDifference:
    """The parameter whose gradient is furthest from the true one."""

    error: float
    name: str

    def text(self, tolerance: float) -> str:
        """What is wrong; nothing if the difference is one of rounding."""
        if self.error <= tolerance:
            return ""
        return f"the gradient of {self.name} differs from that of the unsharded model by {self.error:.1e}"
