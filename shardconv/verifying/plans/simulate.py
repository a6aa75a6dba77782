"""Simulates the ranks on numbers, before a byte is written.

All ranks run in one process, on random weights, in float64, and must return what the unsharded model
returns. Layers of a kind that is there already are bypassed, so that deep models fit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from textwrap import shorten

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import PlanError, ShardconvError, SolveError, SourceError
from shardconv_runtime.format.dims import axes_of, size
from shardconv_runtime.format.plan import AllGatherStep, Plan, module_plans, parameter_plans
from shardconv_runtime.format.slices import ranges
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from shardconv_runtime.training.prepare import parallelize_for_training
from shardconv_runtime.training.sequence import FLAT_OUTPUTS, attach_sequence
from torch import Tensor, nn

from ...tracing.fold import prefixes
from ...tracing.inputs import TraceInputs
from ...tracing.trace import results
from ..simulation.float64 import Float64, WithoutDropout
from ..simulation.memory import available_bytes
from ..simulation.rank_threads import run_ranks
from ..simulation.shallow import Bypass, bypass, planned_alike
from ..simulation.simulated_weights import RandomWeights, Weights, fill, local_weights

TOLERANCE = 1e-9
"""Largest difference of the outputs, relative to the largest output, in float64."""
MAX_SIMULATED_BYTES = 16 * 2**30
"""Above this, or half of the free memory, a model is not simulated."""


class Unprovable(SolveError):
    """The unsharded model itself fails on random weights."""


def simulate(
    plan: Plan,
    model: nn.Module,
    inputs: TraceInputs,
    bypassed: Mapping[str, Bypass] | None = None,
    max_bytes: int | None = None,
    *,
    gradients: bool = False,
) -> Outcome | None:
    """Run every rank in this process and compare with the unsharded model.

    Args:
        plan: the plan to prove.
        model: the global model, on meta; it is copied.
        inputs: what it is called with.
        bypassed: layers to leave out, on both sides, if the plan says of them what it says of those
            that stand for them.
        max_bytes: what the simulation may take, if half of the free memory is not less;
            ``MAX_SIMULATED_BYTES`` unless given.
        gradients: run the backward pass too, if there is room for it.

    Returns:
        How they compare; None if the model is too large to be simulated here. Gradients that differ are no
        error: the outcome says which.

    Raises:
        Unprovable: the unsharded model fails.
        SolveError: the ranks' outputs differ from the unsharded model's by more than ``TOLERANCE``.
    """
    weights = RandomWeights(plan)
    simulation = Simulation(plan, model, inputs, planned_alike(plan, bypassed or {}), weights)
    room = min(max_bytes or MAX_SIMULATED_BYTES, available_bytes() // 2)
    if simulation.needed_bytes() > room:
        return None
    try:
        outcome = simulation.run(gradients and 2 * simulation.needed_bytes() <= room)
    except Unprovable as error:
        raise Unprovable(
            f"the unsharded model fails on random weights, so that the plan cannot be proven on numbers: "
            f"{error}; pass --no-check (check=False) to rely on shapes and positions"
        ) from error
    if not outcome.agrees:
        raise SolveError(
            f"the plan is wrong: simulated ranks differ from the unsharded model by {outcome.worst:.1e} of "
            f"its largest output (allowed: {outcome.tolerance:.0e}). Nothing was written. This is a bug in "
            "shardconv; please report it."
        )
    return outcome


def may_be_padded(plan: Plan, model: nn.Module, inputs: TraceInputs, bypassed: Mapping[str, Bypass]) -> bool:
    """Whether padding at the end of sequences, in the way of the runtime, changes no token's results.

    Args:
        plan: of the model.
        model: the global model, on meta; it is copied.
        inputs: what it is called with.
        bypassed: as for ``simulate``.

    Returns:
        False also where the model is too large to be run here.
    """
    mask = inputs.tensors.get("attention_mask")
    if mask is not None:  # as texts are padded: a token that may look at nothing has no result to keep
        mask = torch.ones_like(mask)
        mask[0, -2:] = 0
        inputs = replace(inputs, tensors={**inputs.tensors, "attention_mask": mask})
    options = {name: value for name, value in inputs.options.items() if name not in FLAT_OUTPUTS}
    inputs = replace(inputs, options=options)
    weights = RandomWeights(plan)
    simulation = Simulation(plan, model, inputs, planned_alike(plan, bypassed), weights)
    room = min(MAX_SIMULATED_BYTES, available_bytes() // 2)
    return 2 * simulation.whole_bytes() <= room and simulation.agrees_when_padded()


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


@dataclass(frozen=True, slots=True)
class _Precision:
    dtype: torch.dtype
    tolerance: float

    def computing(self) -> AbstractContextManager[object]:
        """In float64, casts to float32 inside of the model are left out."""
        return Float64() if self.dtype == torch.float64 else nullcontext()


_PRECISIONS = (_Precision(torch.float64, TOLERANCE), _Precision(torch.float32, 1e-4))
"""The second is for the few models whose code insists on float32 somewhere."""


class Simulation:
    """One model, one plan: the unsharded run and that of each rank, on the same weights.

    Args:
        plan: the plan to prove.
        model: the global model, on meta; it is copied.
        inputs: what it is called with.
        skipped: layers to leave out, on both sides.
        weights: of both sides.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        inputs: TraceInputs,
        skipped: Mapping[str, Bypass],
        weights: Weights,
    ) -> None:
        self.plan = plan
        self.model = model
        self.inputs = inputs
        self.skipped = skipped
        self.weights = weights
        self.entries = {n: e for n, e in parameter_plans(plan).items() if not _inside(n, skipped)}

    def run(self, gradients: bool = False) -> Outcome:
        """Run the unsharded model, then all ranks.

        Args:
            gradients: run backward as well, from a random gradient of everything that the model returns.

        Raises:
            Unprovable: the unsharded model fails.
            SolveError: the ranks fail.
            ShardconvError: weights cannot be read, or the plan does not fit the model.
        """
        precision, want, problem = self._reference(gradients)
        gradients = gradients and not problem
        try:
            worst = max(run_ranks(self.plan.mesh, lambda comm: self._distance(comm, precision, want.outputs)))
        except (PlanError, SourceError):
            raise
        except Exception as error:
            raise SolveError(f"the plan failed when its ranks were simulated: {error}") from error
        if gradients:
            problem = self._wrong_gradient(precision, want.gradients)
        return Outcome(worst, precision.tolerance, precision.dtype, problem)

    def agrees_when_padded(self) -> bool:
        """Whether the unsharded model gives each token what it gives it without padding at the end.

        Raises:
            Unprovable: the unsharded model fails.
        """
        precision, want, _ = self._reference(False)
        padded = self._whole(precision, False)
        length = self.inputs.tensors["input_ids"].shape[1]
        attach_sequence(padded, next(n for n in (4, 3, 5, 7, 11) if length % n))
        try:
            found = _outputs(padded, self.inputs, precision)
        except ShardconvError:
            return False  # an argument that nobody can pad
        return _difference(found, want.outputs) <= precision.tolerance

    def _wrong_gradient(self, precision: _Precision, want: Mapping[str, Tensor]) -> str:
        """What is wrong with the gradients of the ranks, in training mode; empty if nothing is."""
        try:
            found = run_ranks(self.plan.mesh, lambda comm: self._gradient_distance(comm, precision, want))
        except Exception as error:
            return f"in training mode a rank fails, the unsharded model does not: {shorten(str(error), 200)}"
        return max(found).text(precision.tolerance)

    def whole_bytes(self) -> int:
        """A float64 copy of the whole model."""
        return sum(8 * math.prod(size(d) for d in entry.dims) for entry in self.entries.values())

    def needed_bytes(self) -> int:
        """Float64 copies of the whole model and of all ranks."""
        total = 0
        for entry in self.entries.values():
            numel = math.prod(size(d) for d in entry.dims)
            split = math.prod(self.plan.mesh[a] for a in {a for d in entry.dims for a in axes_of(d)})
            total += 8 * numel * (1 + self.plan.tp // split)
        return total

    def _reference(self, gradients: bool) -> tuple[_Precision, _Run, str | None]:
        """What the unsharded model gives, in the best precision that its code bears, and why without
        gradients although they were asked for."""
        problem: Exception | None = None
        for precision in _PRECISIONS:
            whole = self._whole(precision, gradients)
            try:
                want = _outputs(whole, self.inputs, precision)
                if not all(t.isfinite().any() for t in want if t.numel()):
                    problem = problem or ArithmeticError("an output has no finite value")
                elif not gradients:
                    return precision, _Run(want), None
                else:
                    return precision, *_with_gradients(whole, self.inputs, precision, want)
            except Exception as error:
                problem = problem or error.with_traceback(None)  # which would keep the weights in memory
        raise Unprovable(str(problem)) from problem

    def _whole(self, precision: _Precision, gradients: bool) -> nn.Module:
        """The unsharded model with its weights."""
        whole = bypass(copy.deepcopy(self.model).to(precision.dtype), self.skipped)
        values = self.weights.whole({n: t for n, t in stored_tensors(whole) if n in self.entries})
        return fill(whole, values, gradients)

    def _distance(self, comm: Communicator, precision: _Precision, want: list[Tensor]) -> float:
        """How far one rank is from ``want``, with whole logits and with its own part of them."""
        parts = self.weights.local(comm.rank)
        whole = self._rank(comm, precision, parts)
        worst = _difference(_outputs(whole, self.inputs, precision), want)
        if self.plan.logits is None or "labels" in self.inputs.tensors:
            return worst
        own = self._rank(comm, precision, parts, gather_logits=False)
        found = _outputs(own, self.inputs, precision)
        return max(worst, _difference(found, self._with_own_logits(want, comm.rank)))

    def _gradient_distance(
        self, comm: Communicator, precision: _Precision, want: Mapping[str, Tensor]
    ) -> _GradientDifference:
        """How far the gradients of one rank are from ``want``."""
        model = self._rank(comm, precision, self.weights.local(comm.rank), training=True)
        found = _gradients(model, self.inputs, precision)
        return self._compare_gradients(found, want, comm.rank)

    def _rank(
        self,
        comm: Communicator,
        precision: _Precision,
        parts: Mapping[str, Tensor],
        *,
        gather_logits: bool = True,
        training: bool = False,
    ) -> nn.Module:
        """The model of one rank."""
        model = copy.deepcopy(self.model).to(precision.dtype)
        make = parallelize_for_training if training else parallelize
        local = make(model, self.plan, comm, gather_logits)
        return fill(bypass(local, self.skipped), parts, training)

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


@dataclass(frozen=True)
class _Run:
    """What a model gives: its outputs and, by name, the gradients of its parameters."""

    outputs: list[Tensor]
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


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


def _inside(name: str, layers: Mapping[str, Bypass]) -> bool:
    """Whether a parameter belongs to one of the layers."""
    return any(p in layers for p in prefixes(name))


def _outputs(model: nn.Module, inputs: TraceInputs, precision: _Precision) -> list[Tensor]:
    inputs = inputs.to(precision.dtype)
    with torch.inference_mode(), precision.computing(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a model that draws random numbers draws the same on every rank
        result = model(**inputs.tensors, **inputs.options)
    return results(model, result)


def _with_gradients(
    model: nn.Module, inputs: TraceInputs, precision: _Precision, outputs: list[Tensor]
) -> tuple[_Run, str | None]:
    """What the unsharded model gives, and why without gradients, if it is."""
    try:
        gradients = _gradients(model, inputs, precision)
    except Exception as error:
        return _Run(outputs), f"the unsharded model has no backward pass: {shorten(str(error), 200)}"
    run = _Run(outputs, gradients)
    if not gradients:
        return run, "no output of the unsharded model has a gradient"
    if infinite := [name for name, g in gradients.items() if not g.isfinite().all()]:
        return run, f"the gradient of {infinite[0]} is not finite in the unsharded model"
    return run, None


def _gradients(model: nn.Module, inputs: TraceInputs, precision: _Precision) -> dict[str, Tensor]:
    """Run forward in training mode, without dropout, and backward from a random gradient of every output."""
    inputs = inputs.to(precision.dtype)
    model.train()
    with torch.enable_grad(), precision.computing(), WithoutDropout(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = results(model, model(**inputs.tensors, **inputs.options))
        torch.manual_seed(1)
        terms = [
            (torch.where(t.isfinite(), t, 0.0) * torch.randn(t.shape, dtype=t.dtype)).sum()
            for t in outputs
            if t.requires_grad and t.dtype == precision.dtype
        ]
        if terms:
            torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _difference(got: list[Tensor], want: list[Tensor]) -> float:
    if [t.shape for t in got] != [t.shape for t in want]:
        return math.inf
    return max((_relative(x.double(), y.double()) for x, y in zip(got, want, strict=True)), default=0.0)


def _relative(x: Tensor, y: Tensor) -> float:
    """Largest difference over the largest value; the same infinity or NaN is no difference."""
    finite = y.isfinite()
    if y.numel() == 0:
        return 0.0
    if not finite.any():
        return math.inf  # nothing to compare: nothing is proven
    same = (x == y) | (x.isnan() & y.isnan())
    error = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=math.inf)
    return float(error.max() / y[finite].abs().max().clamp_min(1e-30))
