"""The simulated ranks of a plan, compared with the unsharded model on the same weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from textwrap import shorten
from typing import TypeVar

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import PlanError, ShardconvError, SolveError
from shardconv_runtime.format.dims import axes_of, size
from shardconv_runtime.format.module_steps import AllGatherStep
from shardconv_runtime.format.plan import ModulePlan, Plan, module_plans, parameter_plans
from shardconv_runtime.format.slices import ranges
from shardconv_runtime.format.stage_names import num_stages
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from shardconv_runtime.parallel.layers import without_logits_gather
from shardconv_runtime.parallel.local_modules import local_view
from shardconv_runtime.training.prepare import TrainingForm, parallelize_for_training
from shardconv_runtime.training.sequence import attach_sequence
from torch import Tensor, nn

from ..inputs.trace_inputs import TraceInputs
from .available_memory import SharedActivations, collect_garbage, require_memory
from .model_runs import (
    PRECISIONS,
    Precision,
    ReusedModel,
    gradients_of,
    largest_difference,
    outputs_of,
    outputs_of_calls,
    raw_output_of,
    usable_gradients,
)
from .module_comparison import Follower, ModuleComparison, ModuleDifference
from .random_weights import RandomWeights, SimulatedWeights, fill
from .rank_threads import ThreadCommunicator, Turn, communicators, run_ranks
from .stage_simulation import Mail, MailTransport, gradients_of_stages, stage_of_rank

T = TypeVar("T")
Parallelize = Callable[[nn.Module, Plan, Communicator], nn.Module]


LAST_DIGITS = 4
"""Units in the last place by which weights are changed, to see how a model amplifies rounding."""
VISIBLE = 0.1
"""Largest change of results by ``LAST_DIGITS``, relative to the tolerance. Ranks round in many more
places."""


MOST_AMPLIFIED = 1e5
"""Largest error of the ranks that rounding explains, relative to the change of results by ``LAST_DIGITS``."""


class Unprovable(SolveError):
    """The unsharded model itself fails on the weights."""


class RanksWrong(SolveError):
    """The ranks compute something else than the unsharded model, or fail."""

    def __init__(
        self,
        problem: str,
        worst: float = math.inf,
        find: Callable[[], ModuleDifference | None] = lambda: None,
    ) -> None:
        super().__init__(f"{problem}. Nothing was written. This is a bug in shardconv; please report it.")
        self.problem = problem
        self.worst = worst
        self._find = find

    def located(self) -> RanksWrong:
        """Return the error with the module in which it begins."""
        return RanksWrong(with_module(self.problem, self._find), self.worst)


def with_module(problem: str, find: Callable[[], ModuleDifference | None]) -> str:
    """Add the first module that differs to a problem, if one is found."""
    try:
        first = find()
    except Exception as error:  # the problem itself is what must be said
        require_memory(error)
        return problem
    return problem if first is None else f"{problem}; {first}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the simulated ranks compare with the unsharded model."""

    worst: float
    """Largest difference of an output, relative to its largest value."""
    gradients: str | None = None
    """The problem of the gradients; empty if they are right, None if they were not compared."""
    calls: int = 1
    """Number of calls that were compared."""


class Logits(Enum):
    """The choice of the logits that ranks return if logits are sharded. Calls with labels return gathered
    ones."""

    GATHERED = "gathered"
    OWN = "own"
    BOTH = "both"


_MANY_BYTES = 1 << 28
"""Bytes of weights above which few models are kept at a time."""


class Simulation:
    """The unsharded model and the ranks of one plan, on the same weights.

    Weights are drawn and models are built once for all runs. Models share the weights, but fused products
    are copies: if there are many weights, a rank keeps only the model that it used last.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        weights: SimulatedWeights | None = None,
        precision: Precision = PRECISIONS[0],
    ) -> None:
        self.plan = plan
        self.model = model
        self.weights = weights or RandomWeights(plan)
        self.entries = parameter_plans(plan)
        self._precision = precision
        self._ranks = communicators(plan.mesh)
        self._unsharded: dict[Precision, ReusedModel] = {}
        self._local: dict[tuple[Precision, int, str], ReusedModel] = {}
        self._converted: dict[torch.dtype, nn.Module] = {}
        """The model on meta, by the dtype of its parameters."""
        self.gradient_error = 0.0
        """The largest error of a gradient in the last comparison, relative as in ``Outcome``."""

    def evaluate(self, inputs: TraceInputs, *, calls: int = 1, logits: Logits = Logits.BOTH) -> Outcome:
        """Run the unsharded model, then all ranks."""
        want = self._reference(inputs, calls)
        collect_garbage()
        if self.plan.logits is None or "labels" in inputs.tensors:
            logits = Logits.GATHERED
        find = partial(self.first_difference, inputs, len(want), logits)
        try:
            worst = max(self._run_ranks(lambda comm: self._distance(comm, inputs, want, logits)))
        except PlanError:
            raise
        except Exception as error:
            require_memory(error)
            raise RanksWrong(f"the plan failed when its ranks were simulated: {error}", find=find) from error
        if not worst <= self._precision.tolerance:
            problem = (
                f"the plan is wrong: simulated ranks differ from the unsharded model by {worst:.1e} of its "
                f"largest output (allowed: {self._precision.tolerance:.0e})"
            )
            raise RanksWrong(problem, worst, find)
        return Outcome(worst, calls=len(want))

    def first_difference(
        self, inputs: TraceInputs, calls: int = 1, logits: Logits = Logits.GATHERED
    ) -> ModuleDifference | None:
        """Run everything again, and return the first module that differs; see ``evaluate``."""
        if self.plan.logits is None or "labels" in inputs.tensors:
            logits = Logits.GATHERED
        modules, precision = module_plans(self.plan), self._precision
        run = partial(outputs_of_calls, inputs=inputs, precision=precision, calls=calls)
        kinds: list[tuple[Parallelize, dict[str, ModulePlan]]] = []
        if logits != Logits.OWN:
            kinds.append((parallelize, modules))
        if logits != Logits.GATHERED:
            kinds.append((_with_its_logits, without_logits_gather(modules, self.plan.logits, ())))
        for make, used in kinds:
            comparison = ModuleComparison(self.plan, used, precision)
            self.in_lockstep(comparison, make, run)
            if first := comparison.found():
                return first
        return None

    def first_wrong_gradient(self, inputs: TraceInputs) -> ModuleDifference | None:
        """Run forward and backward again, and return the first module, in backward order, that differs."""
        precision = self._precision
        inputs, _, problem = usable_gradients(lambda: self._unsharded_model(precision), inputs, precision)
        if problem:
            return None
        modules, training = module_plans(self.plan), self.plan.training
        if training is not None and training.parallel_loss:
            modules = without_logits_gather(modules, self.plan.logits, ())
        comparison = ModuleComparison(self.plan, modules, precision, gradients=True)
        run = partial(gradients_of, inputs=inputs, precision=precision)
        self.in_lockstep(comparison, _for_training, run)
        return comparison.found()

    def in_lockstep(
        self, comparison: ModuleComparison, make: Parallelize, run: Callable[[nn.Module], T]
    ) -> tuple[T, list[T | None]]:
        """Run the unsharded model and all ranks in turns, and compare the tensors of their modules."""
        results: list[T] = []

        def unsharded(turn: Turn) -> None:
            try:
                model = self._new_unsharded(self._precision)
                Follower(model, turn.number, comparison, turn.wait_for_others)
                results.append(run(model))
            except ShardconvError:
                raise
            except Exception as error:
                require_memory(error)
                raise Unprovable(str(error)) from error

        def rank(comm: ThreadCommunicator) -> T | None:
            model = self._new_rank(comm, make)
            follower = Follower(model, comm.rank, comparison, comm.turn.wait_for_others)
            try:
                return run(model)
            except Exception as error:
                require_memory(error)
                if isinstance(error, ShardconvError) and not isinstance(error, PlanError):
                    raise
                comparison.fail(follower, error)
                return None

        ranks = run_ranks(self.plan.mesh, rank, unsharded)
        return results[0], ranks

    def evaluate_stages(self, inputs: TraceInputs, *, calls: int = 2) -> float:
        """Run the unsharded model, then all ranks of one stage after the other."""
        want = self._reference(inputs, calls)
        precision, mail = self._precision, Mail()
        model = copy.deepcopy(self.model).to(precision.dtype)
        worst = 0.0
        for stage in range(num_stages(self.plan)):

            def run(comm: ThreadCommunicator, stage: int = stage) -> float:
                weights = self._drawn.local(comm.rank, precision.dtype)
                transport = MailTransport(stage, comm.rank, mail)
                local = stage_of_rank(model, self.plan, comm, stage, weights, transport)
                outputs = outputs_of_calls(local, inputs, precision, len(want))
                return _largest(outputs, want) if stage == num_stages(self.plan) - 1 else 0.0

            try:
                worst = max(self._run_ranks(run))
            except Exception as error:
                require_memory(error)
                raise SolveError(f"stage {stage} failed when it was simulated: {error}") from error
        if left := sorted({(source, stage) for (_, source, stage), tensors in mail.items() if tensors}):
            raise SolveError("stage {1} does not receive all that stage {0} sends".format(*left[0]))
        if not worst <= precision.tolerance:
            raise SolveError(
                "the model cannot be cut into stages: the last stage's results differ from the unsharded "
                f"model's by {worst:.1e} of the largest (allowed: {precision.tolerance:.0e})"
            )
        return worst

    def wrong_gradient(self, inputs: TraceInputs) -> str:
        """Return the error of the ranks' gradients in training mode; empty if they are right.

        Backward runs from a random gradient of everything that the model returns, in the precision of the
        last evaluation.
        """

        def gradients(comm: ThreadCommunicator, inputs: TraceInputs) -> dict[str, Tensor]:
            model = self._rank(comm, _for_training)
            gradients = gradients_of(model, inputs, self._precision)
            model.zero_grad(set_to_none=True)
            return gradients

        return self._wrong_gradient(inputs, gradients)

    def wrong_stage_gradient(self, inputs: TraceInputs) -> str:
        """Return the error of the gradients of all stages' ranks; see ``wrong_gradient``."""
        model = copy.deepcopy(self.model).to(self._precision.dtype)

        def gradients(comm: ThreadCommunicator, inputs: TraceInputs) -> dict[str, Tensor]:
            weights = self._drawn.local(comm.rank, self._precision.dtype)
            return gradients_of_stages(model, self.plan, comm, weights, inputs, self._precision)

        return self._wrong_gradient(inputs, gradients)

    def _wrong_gradient(
        self,
        inputs: TraceInputs,
        gradients_on: Callable[[ThreadCommunicator, TraceInputs], dict[str, Tensor]],
    ) -> str:
        self.gradient_error = math.inf
        inputs, gradients, problem = usable_gradients(
            lambda: self._unsharded_model(self._precision), inputs, self._precision
        )
        if problem:
            return problem
        scales = _gradient_scales(gradients, self._precision)
        collect_garbage()
        shared = SharedActivations()

        def run(comm: ThreadCommunicator) -> tuple[float, str]:
            with shared.of_a_rank():
                local = gradients_on(comm, inputs)
            return self._worst_gradient(local, gradients, scales, comm.rank)

        try:
            self.gradient_error, name = max(self._run_ranks(run))
        except Exception as error:
            require_memory(error)
            return f"in training mode a rank fails, the unsharded model does not: {shorten(str(error), 200)}"
        if self.gradient_error <= self._precision.tolerance:
            return ""
        return f"the gradient of {name} differs from that of the unsharded model by {self.gradient_error:.1e}"

    @cached_property
    def _has_many_weights(self) -> bool:
        return self.needed_bytes() > _MANY_BYTES

    def drop_many(self) -> None:
        """Drop the models of ranks if they have many weights. They are built again when they are needed."""
        if self._has_many_weights:
            self._local.clear()

    def run_unsharded(self, inputs: TraceInputs) -> list[Tensor]:
        """Return the outputs of the unsharded model."""
        return self._reference(inputs)[0]

    def returned(self, inputs: TraceInputs) -> tuple[dict[str, Tensor], nn.Module]:
        """Return the tensors that the unsharded model returns, by name, and the model after this call.

        Tensors inside of containers (states of layers, caches) are left out. The model is a copy of its own,
        since calls with labels may write to the config.
        """
        model = self._new_unsharded(self._precision)
        try:
            result = raw_output_of(model, inputs, self._precision)
        except Exception as error:
            require_memory(error)
            raise Unprovable(str(error)) from error
        named = dict(result) if isinstance(result, Mapping) else {}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}, model

    def agrees_when_padded(self, inputs: TraceInputs) -> bool:
        """Return whether the unsharded model computes the same for each token with and without padding at the
        end.
        """
        (want,) = self._reference(inputs)
        padded = self._new_unsharded(self._precision)
        length = inputs.tensors["input_ids"].shape[1]
        attach_sequence(padded, next(n for n in (4, 3, 5, 7, 11) if length % n))
        try:
            outputs = outputs_of(padded, inputs, self._precision)
        except ShardconvError:
            return False  # an argument that cannot be padded
        return largest_difference(outputs, want) <= self._precision.tolerance

    def changes_without_cache(self, inputs: TraceInputs) -> bool:
        """Return whether the first output of the unsharded model changes if no cache is filled."""
        if not inputs.options.get("use_cache"):
            return False
        (want,) = self._reference(inputs)
        without = replace(inputs, options={**inputs.options, "use_cache": False})
        outputs = outputs_of(self._unsharded_model(self._precision), without, self._precision)
        return largest_difference(outputs[:1], want[:1]) > self._precision.tolerance

    def amplifies_rounding(self, inputs: TraceInputs, error: float, *, gradients: bool = False) -> bool:
        """Return whether rounding explains an error, since the unsharded model amplifies it.

        Changes in the last digits of the weights then visibly change its results. Ranks that sum in another
        order may differ from it by as much, and a comparison shows nothing. It happens if random weights
        drive activations apart: softmax saturates, layers repeat. A far larger error is an error.
        """
        if not math.isfinite(error):
            return False
        want = self._reference(inputs)[0]
        precision = self._precision
        changed = self._new_unsharded(precision)
        generator = torch.Generator().manual_seed(0)
        digits = LAST_DIGITS * torch.finfo(precision.dtype).eps
        tensors = {n: t for n, t in stored_tensors(changed) if n in self.entries}
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                signs = torch.randint(0, 2, tensor.shape, generator=generator).mul_(2).sub_(1)
                tensors[name] = tensor.detach() * (1 + digits * signs.to(tensor.dtype))
        fill(changed, tensors, gradients=True)
        if not gradients:
            difference = largest_difference(outputs_of(changed, inputs, precision), want)
        else:
            inputs, exact, problem = usable_gradients(
                lambda: self._unsharded_model(precision), inputs, precision
            )
            if problem:
                return False
            changed_gradients = gradients_of(changed, inputs, precision)
            scales = _gradient_scales(exact, precision)
            errors = (
                (changed_gradients[n] - exact[n]).abs().max() / scales[n]
                for n in exact.keys() & changed_gradients.keys()
            )
            difference = max(map(float, errors), default=0.0)
        return difference > precision.tolerance * VISIBLE and error <= MOST_AMPLIFIED * difference

    def needed_bytes(self) -> int:
        """Return the bytes of float64 copies of the unsharded model and of all ranks."""
        total = 0
        for entry in self.entries.values():
            numel = math.prod(size(d) for d in entry.dims)
            num_shards = math.prod(self.plan.mesh[a] for a in {a for d in entry.dims for a in axes_of(d)})
            total += 8 * numel * (1 + self.plan.tp // num_shards)
        return total

    @property
    def _drawn(self) -> RandomWeights:
        assert isinstance(self.weights, RandomWeights), "stages are simulated on random weights"
        return self.weights

    # The unsharded model ---------------------------------------------------------------------

    def _reference(self, inputs: TraceInputs, calls: int = 1) -> list[list[Tensor]]:
        """Return the outputs of each call of the unsharded model, in the best precision that it supports."""
        problem: Exception | None = None
        for precision in PRECISIONS:
            try:
                model = self._unsharded_model(precision)
                want = outputs_of_calls(model, inputs, precision, calls, or_fewer=True)
                if self.weights.were_written_to():
                    self._unsharded.clear()
                    return self._reference(inputs, calls)
                if all(t.isfinite().any() for t in want[0] if t.numel()):
                    self._precision = precision
                    return want
                problem = problem or ArithmeticError("an output has no finite value")
            except Exception as error:
                require_memory(error)
                problem = problem or error.with_traceback(None)  # which would keep the weights in memory
        raise Unprovable(str(problem)) from problem

    def _unsharded_model(self, precision: Precision) -> nn.Module:
        if precision not in self._unsharded or self.weights.own_copies:
            self._unsharded[precision] = ReusedModel(self._new_unsharded(precision))
        return self._unsharded[precision].fresh()

    def _new_unsharded(self, precision: Precision) -> nn.Module:
        model = copy.deepcopy(self.model).to(precision.dtype)
        return self.weights.put_into(model, None, precision.dtype, gradients=True)

    # The ranks -------------------------------------------------------------------------------

    def _run_ranks(self, function: Callable[[ThreadCommunicator], T]) -> list[T]:
        try:
            return run_ranks(self.plan.mesh, function, ranks=self._ranks)
        except BaseException:
            self._local.clear()  # some have stopped in the middle of a run
            raise
        finally:
            collect_garbage()

    def _distance(
        self, comm: Communicator, inputs: TraceInputs, want: list[list[Tensor]], logits: Logits
    ) -> float:
        """Return the distance of one rank's outputs from ``want``, the outputs of each call."""
        precision, worst = self._precision, 0.0
        if logits != Logits.OWN:
            outputs = outputs_of_calls(self._rank(comm, parallelize), inputs, precision, len(want))
            worst = _largest(outputs, want)
        if logits != Logits.GATHERED:
            expected = [
                self._with_own_logits(w, comm.rank) for w in want[: 1 if logits == Logits.BOTH else None]
            ]
            outputs = outputs_of_calls(self._rank(comm, _with_its_logits), inputs, precision, len(expected))
            worst = max(worst, _largest(outputs, expected))
        return worst

    def _rank(self, comm: Communicator, make: Parallelize) -> nn.Module:
        """Return the model of one rank; models are made once for each precision and kind."""
        precision = self._precision
        key = precision, comm.rank, make.__name__
        if key not in self._local or self.weights.own_copies:
            if self._has_many_weights:
                for other in [k for k in self._local if k[1] == comm.rank]:
                    del self._local[other]
            self._local[key] = ReusedModel(self._new_rank(comm, make))
        return self._local[key].fresh()

    def _new_rank(self, comm: Communicator, make: Parallelize) -> nn.Module:
        dtype = self._precision.dtype
        if dtype not in self._converted:
            self._converted[dtype] = copy.deepcopy(self.model).to(dtype)
        model = self._converted[dtype]
        # The plan replaces all parameters, so they need no copies.
        unsharded = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        local = make(unsharded, self.plan, comm)
        return self.weights.put_into(local, comm.rank, dtype, gradients=make is _for_training)

    def _worst_gradient(
        self, local: Mapping[str, Tensor], want: Mapping[str, Tensor], scales: Mapping[str, float], rank: int
    ) -> tuple[float, str]:
        """Return the largest error of a rank's gradients, relative to the scales, and its parameter."""
        worst = 0.0, ""
        for name, value in want.items():
            part = local_view(self.entries[name], value, self.plan.mesh, rank)
            difference = part if name not in local else local[name] - part
            error = float(difference.abs().max()) / scales[name] if part.numel() else 0.0
            worst = max(worst, (math.inf if math.isnan(error) else error, name))
        return worst

    def _with_own_logits(self, want: list[Tensor], rank: int) -> list[Tensor]:
        """Return the model's outputs with the rank's shard of the logits, which are the first output."""
        logits = self.plan.logits
        assert logits is not None
        steps = module_plans(self.plan)[logits.module].outputs
        layout = next(s.layout for s in steps if isinstance(s, AllGatherStep) and s.port == logits.port)
        indices = torch.tensor([i for a, b in ranges(layout, self.plan.mesh, rank) for i in range(a, b)])
        index = next(i for i, t in enumerate(want) if t.shape[-1:] == (size(layout),))
        return [*want[:index], want[index].index_select(-1, indices.long()), *want[index + 1 :]]


def _with_its_logits(model: nn.Module, plan: Plan, comm: Communicator) -> nn.Module:
    return parallelize(model, plan, comm, gather_logits=False)


def _for_training(model: nn.Module, plan: Plan, comm: Communicator) -> nn.Module:
    return parallelize_for_training(model, plan, comm, TrainingForm(gather_logits=True))


def _gradient_scales(gradients: Mapping[str, Tensor], precision: Precision) -> dict[str, float]:
    """Return the sizes to which differences of gradients are relative, by the names of parameters.

    They are the largest elements. Where that is tiny compared with other parameters (zero up to rounding), it
    is a fraction of the others' largest element.
    """
    largest = {name: float(g.abs().max()) if g.numel() else 0.0 for name, g in gradients.items()}
    of_all = max(largest.values(), default=0.0)
    return {name: max(size, precision.least_gradient * of_all, 1e-30) for name, size in largest.items()}


def _largest(got: list[list[Tensor]], want: list[list[Tensor]]) -> float:
    """Return the largest difference of several calls."""
    return max(largest_difference(x, y) for x, y in zip(got, want, strict=True))
