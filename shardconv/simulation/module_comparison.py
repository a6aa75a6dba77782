"""Find the first module that computes something else on the ranks than in the unsharded model.

The unsharded model and all ranks report the tensors at the boundaries of modules, before and after the plan's
steps, and in a backward pass their gradients. The first tensor that the plan does not explain is the fault of
the module whose code or step has made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.plan import ModulePlan, Plan, parameter_plans
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from shardconv_runtime.parallel.local_modules import local_view
from torch import Tensor, nn

from ..tracing.trace import tensor_ports
from .explanations import UNKNOWN, Explanations, Placement, around_step
from .model_runs import Precision
from .rank_threads import BESIDE

UNSHARDED = BESIDE
"""Number of the unsharded run; the ranks have the numbers from 0."""

BEFORE, AFTER = "before", "after"
"""Whether a tensor is seen before or after the plan's steps at its port."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A tensor of one call of a module, or (with call -1) a parameter of it."""

    fqn: str
    call: int
    port: str
    side: str = AFTER
    caller: str = ""
    """The module whose code makes the call."""

    @property
    def is_input(self) -> bool:
        return self.port.startswith("input")


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """The first module that differs."""

    fqn: str
    what: str
    """How it shows."""
    worst: float
    """Difference by the explanation that fits best, relative to the largest value of the tensor."""

    def __str__(self) -> str:
        """Say which module it is, and how it shows."""
        return f"it begins in {self.fqn or 'the model itself'}: {self.what}"


class ModuleComparison:
    """Compare the tensors of module calls as soon as all runs have reported them.

    Tensors that some run does not report are dropped when all runs have passed their call.
    """

    def __init__(
        self, plan: Plan, modules: Mapping[str, ModulePlan], precision: Precision, *, gradients: bool = False
    ) -> None:
        self.plan = plan
        self.modules = modules
        self.precision = precision
        self.gradients = gradients
        self.first: ModuleDifference | None = None
        self.failure: ModuleDifference | None = None
        """The module in which a rank failed first."""
        self._first_order = 0
        self._explanations = Explanations(plan)
        self._entries = parameter_plans(plan)
        self._order: dict[Observation, int] = {}
        """Observations in the order in which the unsharded model reports them."""
        self._waiting: dict[Observation, dict[int, Tensor]] = {}
        self.positions: dict[tuple[str, int], int] = {}
        """Calls of modules in the order in which the unsharded model enters them."""
        self._ends: dict[tuple[str, int], int] = {}
        self._entered: dict[int, int] = {}
        self.names: dict[str, tuple[str, ...]] = {}
        """Names of the parameters of the unsharded model's ``forward`` methods, by FQN."""
        self._largest = 0.0

    def enter(self, run: int, call: tuple[str, int]) -> int | None:
        """Note that a run has reached a call, and return its position; None if it is not compared."""
        if run == UNSHARDED:
            self.positions[call] = len(self.positions)
        position = self.positions.get(call)
        if position is not None and not self.gradients:
            self._entered[run] = position
            if len(self._entered) > self.plan.tp:
                passed = min(self._entered.values())
                for observed in [
                    p for p in self._waiting if self._ends.get((p.fqn, p.call), passed) < passed
                ]:
                    del self._waiting[observed]
        return position

    def leave(self, run: int, call: tuple[str, int]) -> None:
        """Note that a run has left a call."""
        if run == UNSHARDED:
            self._ends[call] = len(self.positions) - 1

    def fail(self, follower: Follower, error: Exception) -> None:
        """Note that a rank has failed in the innermost call that is running."""
        if self.failure is None:
            fqn = follower.open[-1][0] if follower.open else ""
            what = f"a rank fails there: {shorten(str(error), 200)}"
            self.failure = ModuleDifference(fqn, what, math.inf)

    def found(self) -> ModuleDifference | None:
        """Return the first module that differs, or else the one in which a rank has failed."""
        return self.first or self.failure

    def report(self, run: int, observed: Observation, tensor: Tensor) -> None:
        """Compare a tensor, which is local on a rank, when all runs have reported it."""
        if run == UNSHARDED:
            self._order[observed] = len(self._order)
            if self.gradients:
                self._largest = max(self._largest, float(tensor.abs().max()) if tensor.numel() else 0.0)
        reported = self._waiting.setdefault(observed, {})
        reported[run] = tensor.detach().clone()  # code after the call may write to it
        if len(reported) <= self.plan.tp:
            return
        del self._waiting[observed]
        order = self._order[observed]
        if self.first is None or order < self._first_order:
            worst = self._difference(
                observed, reported[UNSHARDED], [reported[r] for r in range(self.plan.tp)]
            )
            if not worst <= self.precision.tolerance:
                self.first, self._first_order = self._blame(observed, worst), order

    def _difference(self, observed: Observation, want: Tensor, ranks: Sequence[Tensor]) -> float:
        least = self.precision.least_gradient * self._largest if self.gradients else 0.0
        if observed.call < 0:
            entry = self._entries[f"{observed.fqn}.{observed.port}" if observed.fqn else observed.port]
            scale = max(float(want.abs().max()) if want.numel() else 0.0, least, 1e-30)
            pairs = ((mine, local_view(entry, want, self.plan.mesh, r)) for r, mine in enumerate(ranks))
            errors = (float((mine - part).abs().max()) / scale for mine, part in pairs if part.numel())
            return max(errors, default=0.0)
        return self._explanations.difference(want, ranks, self.placement(observed), least)

    def placement(self, observed: Observation) -> Placement:
        """Return the knowledge that the plan has about a tensor."""
        entry = self.modules.get(observed.fqn)
        if entry is None:
            return UNKNOWN
        is_before = observed.side == BEFORE
        if is_before and not self.gradients:
            # A row-parallel layer is given the part of its input that its weight has columns for.
            weight = self._entries.get(f"{observed.fqn}.weight")
            if (
                observed.is_input
                and entry.category == "row"
                and entry.input_is_parallel
                and weight is not None
            ):
                sharded = [dim for dim in weight.dims if axes_of(dim)]
                return Placement({-1: sharded[0]}) if len(sharded) == 1 else UNKNOWN
            return UNKNOWN
        steps = [s for s in (entry.inputs if observed.is_input else entry.outputs) if s.port == observed.port]
        which = (1 if is_before else 2) if self.gradients else 0
        placed = UNKNOWN
        for step in reversed(steps) if is_before else steps:
            placed = placed.then(around_step(step)[which])
        return placed

    def _blame(self, observed: Observation, worst: float) -> ModuleDifference:
        """Return the module whose code or steps have made a tensor."""
        made_by_caller = observed.is_input == (not self.gradients) and observed.side == (
            AFTER if self.gradients else BEFORE
        )
        fqn = observed.caller if made_by_caller and observed.call >= 0 else observed.fqn
        owner = "its" if fqn == observed.fqn else f"{observed.fqn}'s"
        what = f"{owner} {observed.port.replace('.', ' ', 1)}"
        if self.gradients:
            what = f"the gradient of {what}"
        size = "has another shape" if worst == math.inf else f"differs by {worst:.1e}"
        return ModuleDifference(fqn, f"{what} {size}", worst)


# The hooks through which a run reports.

WITH_STEPS_INSIDE = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
"""Modules that run the plan's steps themselves, so that tensors between are not seen."""


class Follower:
    """One run, whose model reports the tensors at the boundaries of its modules."""

    def __init__(
        self,
        model: nn.Module,
        run: int,
        comparison: ModuleComparison,
        wait: Callable[[int], object] = lambda position: None,
    ) -> None:
        self.run = run
        self.comparison = comparison
        self._wait = wait
        """Waits for runs that have not reached a position."""
        self.open: list[tuple[str, int]] = []
        """The calls of modules that are running, the innermost one last."""
        self._num_calls: dict[str, int] = {}
        # Inside of these, ranks compute in another way: on other tokens, or not in modules.
        otherwise = tuple(
            f"{fqn}."
            for fqn, entry in comparison.modules.items()
            if entry.norm is not None or entry.category == "experts"
        )
        for fqn, module in model.named_modules():
            if not fqn.startswith(otherwise):
                self._attach(fqn, module)
        if comparison.gradients:
            entries = parameter_plans(comparison.plan)
            for name, parameter in model.named_parameters():
                if name in entries and parameter.requires_grad:
                    owner, _, attribute = name.rpartition(".")
                    observed = Observation(owner, -1, attribute)
                    hook = partial(self._accumulated, observed)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _attach(self, fqn: str, module: nn.Module) -> None:
        """Report the inputs and outputs of a module before and after the steps in its hooks."""
        names = self.comparison.names.setdefault(fqn, tuple(forward_signature(module).parameters))
        entry = self.comparison.modules.get(fqn)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self.enter(fqn, waits=bool(module._parameters))
            named = _named(names, args, kwargs)
            if self.comparison.gradients:
                # The gradient of a tensor is the sum over all of its readers; of a view, of this one alone.
                named = {name: _viewed(value) for name, value in named.items()}
            self._report(BEFORE, "input", named)
            values = tuple(named.values())[: len(args)]
            return values, {name: named[name] for name in kwargs}

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._report(AFTER, "output", output)
            self.leave(fqn)

        def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._report(AFTER, "input", _named(names, args, kwargs))

        def computed(module: nn.Module, args: Any, output: Any) -> None:
            self._report(BEFORE, "output", output)

        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave)
        if entry is not None and not isinstance(module, WITH_STEPS_INSIDE):
            if entry.inputs:
                module.register_forward_pre_hook(entered, with_kwargs=True)
            if entry.outputs and self.comparison.gradients:
                module.register_forward_hook(computed, prepend=True)

    def enter(self, fqn: str, *, waits: bool) -> None:
        """Note that a call begins. If it ``waits``, runs that have not reached it go on first."""
        number = self._num_calls[fqn] = self._num_calls.get(fqn, -1) + 1
        self.open.append((fqn, number))
        position = self.comparison.enter(self.run, self.open[-1])
        if waits and position is not None and not self.comparison.gradients:
            self._wait(position)

    def leave(self, fqn: str) -> None:
        """Note that a call has ended, and with it calls that have failed in it."""
        while self.open:
            call = self.open.pop()
            if call[0] == fqn:
                self.comparison.leave(self.run, call)
                return

    def _report(self, side: str, prefix: str, value: Any) -> None:
        caller = self.open[-2][0] if len(self.open) > 1 else ""
        for port, tensor in tensor_ports(prefix, value):
            observed = Observation(*self.open[-1], port, side, caller)
            if not self.comparison.gradients:
                if tensor.is_floating_point():
                    self.comparison.report(self.run, observed, tensor)
            elif tensor.requires_grad:
                tensor.register_hook(partial(self._reported, observed))  # type: ignore[no-untyped-call]

    def _reported(self, observed: Observation, gradient: Tensor) -> None:
        self.comparison.report(self.run, observed, gradient)

    def _accumulated(self, observed: Observation, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.comparison.report(self.run, observed, parameter.grad)


def _named(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, or by position where there is none."""
    return {names[i] if i < len(names) else str(i): each for i, each in enumerate(args)} | kwargs


def _viewed(value: Any) -> Any:
    """Return a view of a tensor, or of the tensors in a tuple."""
    if isinstance(value, Tensor):
        return value.view_as(value) if value.requires_grad else value
    return tuple(map(_viewed, value)) if type(value) is tuple else value
