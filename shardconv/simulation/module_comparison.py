"""Find the first module that computes something else on the ranks than in the unsharded model.

The unsharded model and all ranks report the tensors at the boundaries of modules, before and after the plan's
steps, and in a backward pass their gradients. Where the plan has a step, it fixes the parts of the ranks.
Elsewhere a rank may hold all of a tensor, the positions of dims that some layout of the plan assigns to it,
or a term of a sum over mesh axes, so every explanation is tried. A tensor differs if the shapes allow some
explanations, and the numbers agree with none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations, product
from textwrap import shorten
from typing import Any

import torch
from shardconv_runtime.format.dims import Dim, Leaf, axes_of, is_partially_sharded, leaves, size
from shardconv_runtime.format.plan import ModulePlan, Plan, parameter_plans
from shardconv_runtime.format.slices import Range, group_of, local_segments, ranges
from shardconv_runtime.format.slot_steps import (
    AllGatherStep,
    AllReduceStep,
    Boundary,
    GradAllReduceStep,
    GradDivideStep,
    KeepOnFirstStep,
    ReduceScatterStep,
    SliceStep,
    layout_of,
)
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from shardconv_runtime.parallel.local_modules import local_view
from torch import Tensor, nn

from ..tracing.trace import tensor_slots
from .model_runs import largest_difference
from .rank_threads import BESIDE, Turn

UNSHARDED = BESIDE
"""Number of the unsharded run; the ranks have the numbers from 0."""

# Steps of a plan, and the tensors before and after them.


@dataclass(frozen=True, slots=True)
class Placement:
    """Knowledge about the ranks' parts of a tensor."""

    dims: Mapping[int, Dim | None] = field(default_factory=dict)
    """Dims whose layout is known; None if all ranks have all positions."""
    summed: frozenset[int] = frozenset()
    """Mesh axes over which it is a term of a sum."""
    complete: frozenset[int] = frozenset()
    """Mesh axes over which it is no term of a sum."""

    def then(self, other: Placement) -> Placement:
        """Return the knowledge about the tensor after another step."""
        return Placement(
            {**self.dims, **other.dims},
            (self.summed - other.complete) | other.summed,
            (self.complete - other.summed) | other.complete,
        )


UNKNOWN = Placement()


def _value_after(step: Boundary) -> Placement:
    match step:
        case AllReduceStep():
            return Placement(complete=frozenset(step.axes))
        case KeepOnFirstStep():
            return Placement(summed=frozenset(step.axes))
        case AllGatherStep():
            return Placement({step.dim: None}, complete=axes_of(step.layout))
        case SliceStep() | ReduceScatterStep():
            return Placement({step.dim: step.layout}, complete=axes_of(step.layout))
    return UNKNOWN


def _gradient_after(step: Boundary) -> Placement:
    match step:
        case AllReduceStep():
            return _sum_over(step.grad_axes, step.axes)
        case AllGatherStep():
            return replace(_sum_over(step.grad_axes, axes_of(step.layout)), dims={step.dim: None})
        case SliceStep() | ReduceScatterStep() if not is_partially_sharded(step.layout):
            return Placement({step.dim: step.layout})
        case KeepOnFirstStep() | GradDivideStep():
            return Placement(complete=frozenset(step.axes))
        case GradAllReduceStep():
            return Placement(summed=frozenset(step.axes))
    return UNKNOWN


def _gradient_before(step: Boundary) -> Placement:
    match step:
        case AllReduceStep() | KeepOnFirstStep() | GradAllReduceStep():
            return Placement(complete=frozenset(step.axes))
        case AllGatherStep() if not is_partially_sharded(step.layout):
            return Placement({step.dim: step.layout})
        case SliceStep():
            return replace(_sum_over(step.grad_axes, axes_of(step.layout)), dims={step.dim: None})
        case ReduceScatterStep():
            return Placement({step.dim: None}, complete=axes_of(step.layout))
        case GradDivideStep():
            return Placement(summed=frozenset(step.axes))
    return UNKNOWN


def _sum_over(summed: Iterable[int], axes: Iterable[int]) -> Placement:
    return Placement(summed=frozenset(summed), complete=frozenset(axes).difference(summed))


# The parts of a tensor that ranks may hold.


@dataclass(frozen=True, slots=True)
class _Layout:
    """A layout of a dim, and the positions that each rank holds."""

    axes: frozenset[int]
    positions: tuple[Tensor, ...]
    segments: tuple[tuple[tuple[Range, frozenset[int]], ...], ...] = ()
    """Local positions of each rank, with the axes that shard them, if some are not sharded over all axes."""

    def fits(self, sizes: Sequence[int]) -> bool:
        """Return whether the ranks hold so many positions."""
        return [len(each) for each in self.positions] == list(sizes)


class Explanations:
    """Compare tensors of ranks with the unsharded model's by the layouts of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._mesh = plan.mesh
        steps = (step for entry in plan.modules for step in (*entry.inputs, *entry.outputs))
        of_parameters = (dim for entry in plan.parameters for dim in entry.dims)
        sharded: dict[Dim, None] = {}
        for dim in chain(of_parameters, map(layout_of, steps)):
            if dim is not None:
                sharded |= {part: None for part in (dim, *leaves(dim)) if axes_of(part)}
        self._open = [dim for dim in sharded if isinstance(dim, Leaf) and not dim.size]
        self._known: dict[int, list[Dim]] = {}
        for dim in sharded:
            if _is_known(dim):
                self._known.setdefault(size(dim), []).append(dim)
        self._made: dict[tuple[Dim, int], _Layout] = {}

    def difference(
        self, want: Tensor, ranks: Sequence[Tensor], placed: Placement = UNKNOWN, least_scale: float = 0.0
    ) -> float:
        """Return the difference by the explanation that fits best, relative to the largest value.

        It is 0 if nothing is known and no explanation fits the shapes, and infinite if the known layout of
        a dim does not fit them.
        """
        if not want.is_floating_point() or not want.numel() or not want.isfinite().any():
            return 0.0
        scale = max(1.0, least_scale / float(want[want.isfinite()].abs().max().clamp_min(1e-30)))
        best: float | None = None
        for layouts, summed in self._explanations(want, ranks, placed):
            worst = max(self._distance(want, ranks, layouts, summed, rank) for rank in range(len(ranks)))
            best = worst if best is None else min(best, worst)
            if not best:
                break
        if best is None:
            return math.inf if placed.dims else 0.0
        return best / scale

    def _distance(
        self,
        want: Tensor,
        ranks: Sequence[Tensor],
        layouts: Sequence[_Layout | None],
        summed: Sequence[int],
        rank: int,
    ) -> float:
        for dim, layout in enumerate(layouts):
            if layout is not None:
                want = want.index_select(dim, layout.positions[rank])
        if not want.numel():
            return 0.0
        total = torch.stack([ranks[member] for member in group_of(self._mesh, summed, rank)]).sum(0)
        worst = largest_difference([total], [want])
        for dim, layout in enumerate(layouts):
            if layout is not None and layout.segments and worst > 0:
                worst = min(worst, largest_difference([self._with_sums(ranks, dim, layout, rank)], [want]))
        return worst

    def _with_sums(self, ranks: Sequence[Tensor], dim: int, layout: _Layout, rank: int) -> Tensor:
        """Return a rank's part of a tensor that is a term of a sum where positions are not sharded."""
        pieces = []
        for index, (_, sharded) in enumerate(layout.segments[rank]):
            members = group_of(self._mesh, layout.axes - sharded, rank)
            spans = [(member, *layout.segments[member][index][0]) for member in members]
            terms = [ranks[member].narrow(dim, start, stop - start) for member, start, stop in spans]
            pieces.append(torch.stack(terms).sum(0))
        return torch.cat(pieces, dim)

    def _explanations(
        self, want: Tensor, ranks: Sequence[Tensor], placed: Placement
    ) -> Iterator[tuple[Sequence[_Layout | None], tuple[int, ...]]]:
        """Yield layouts of the dims, and mesh axes over which a tensor is a term of a sum."""
        if any(local.dim() != want.dim() for local in ranks):
            return
        known: dict[int, Sequence[Dim | None]] = {
            dim % max(want.dim(), 1): (layout,)
            for dim, layout in placed.dims.items()
            if layout is None or isinstance(layout, Leaf) or _is_known(layout)
        }
        options = [
            self._of_dim(
                extent,
                [local.shape[dim] for local in ranks],
                known.get(dim, (None, *self._known.get(extent, ()), *self._open)),
            )
            for dim, extent in enumerate(want.shape)
        ]
        for layouts in product(*options):
            used = [axis for layout in layouts if layout is not None for axis in layout.axes]
            if len(used) > len(set(used)):
                continue
            free = set(range(len(self._mesh))) - set(used) - placed.complete - placed.summed
            for count in range(len(free) + 1):
                for more in combinations(sorted(free), count):
                    yield layouts, tuple(sorted({*placed.summed, *more}))

    def _of_dim(
        self, extent: int, sizes: Sequence[int], allowed: Sequence[Dim | None]
    ) -> list[_Layout | None]:
        """Return the allowed layouts with which ranks have these sizes; None is the one of all positions."""
        layouts: list[_Layout | None] = []
        for dim in allowed:
            if dim is None:
                layouts += [None] if all(local == extent for local in sizes) else []
            else:
                layout = self._layout(dim, extent)
                layouts += [layout] if layout is not None and layout.fits(sizes) else []
        return layouts

    def _layout(self, dim: Dim, extent: int) -> _Layout | None:
        """Return a layout for a dim of this size; None if it has another one."""
        if isinstance(dim, Leaf) and not dim.size:  # its size depends on the input, and all parts are equal
            dim = Leaf(extent, dim.axes)
        if size(dim) != extent or not extent:
            return None
        if (dim, extent) not in self._made:
            num_ranks = torch.Size(self._mesh).numel()
            spans = [ranges(dim, self._mesh, rank) for rank in range(num_ranks)]
            positions = tuple(
                torch.tensor([i for start, stop in each for i in range(start, stop)], dtype=torch.int64)
                for each in spans
            )
            segments = tuple(tuple(local_segments(dim, self._mesh, rank)) for rank in range(num_ranks))
            is_mixed = is_partially_sharded(dim) and len(set(map(len, segments))) == 1
            self._made[dim, extent] = _Layout(axes_of(dim), positions, segments if is_mixed else ())
        return self._made[dim, extent]


def _is_known(dim: Dim) -> bool:
    return all(leaf.size for leaf in leaves(dim))  # a leaf of size 0 means a size that depends on the input


# The comparison of all runs.

BEFORE, AFTER = "before", "after"
"""Whether a tensor is seen before or after the plan's steps at its slot."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A tensor of one call of a module, or (with call -1) a parameter of it."""

    fqn: str
    call: int
    slot: str
    side: str = AFTER
    caller: str = ""
    """The module whose code makes the call."""

    @property
    def is_input(self) -> bool:
        return self.slot.startswith("input")


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

    Args:
        plan: the plan of the ranks.
        modules: the entries of the plan that are in use, by FQN.
        tolerance: relative to the largest value.
        gradients: compare gradients instead of values.
    """

    def __init__(
        self, plan: Plan, modules: Mapping[str, ModulePlan], tolerance: float, *, gradients: bool = False
    ) -> None:
        self.plan = plan
        self.modules = modules
        self.tolerance = tolerance
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
        """Note that a rank has failed. Modules before have differed if there is a first one."""
        if self.failure is None:
            fqn = follower.open[-1][0] if follower.open else ""
            what = f"a rank fails there: {shorten(str(error), 200)}"
            self.failure = ModuleDifference(fqn, what, math.inf)

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
            if not worst <= self.tolerance:
                self.first, self._first_order = self._blame(observed, worst), order

    def _difference(self, observed: Observation, want: Tensor, ranks: Sequence[Tensor]) -> float:
        least = LEAST_GRADIENT * self._largest if self.gradients else 0.0
        if observed.call < 0:
            entry = self._entries[f"{observed.fqn}.{observed.slot}" if observed.fqn else observed.slot]
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
        steps = [s for s in (entry.inputs if observed.is_input else entry.outputs) if s.slot == observed.slot]
        if observed.side == BEFORE and not self.gradients:
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
        if observed.side == BEFORE:
            found = map(_gradient_before, reversed(steps))
        else:
            found = map(_gradient_after if self.gradients else _value_after, steps)
        placed = UNKNOWN
        for each in found:
            placed = placed.then(each)
        return placed

    def _blame(self, observed: Observation, worst: float) -> ModuleDifference:
        """Return the module whose code or steps have made a tensor."""
        made_by_caller = observed.is_input == (not self.gradients) and observed.side == (
            AFTER if self.gradients else BEFORE
        )
        fqn = observed.caller if made_by_caller and observed.call >= 0 else observed.fqn
        owner = "its" if fqn == observed.fqn else f"{observed.fqn}'s"
        what = f"{owner} {observed.slot.replace('.', ' ', 1)}"
        if self.gradients:
            what = f"the gradient of {what}"
        size = "has another shape" if worst == math.inf else f"differs by {worst:.1e}"
        return ModuleDifference(fqn, f"{what} {size}", worst)


LEAST_GRADIENT = 1e-4
"""Fraction of the largest gradient; differences of smaller gradients are relative to it."""


# The hooks through which a run reports.

WITH_STEPS_INSIDE = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
"""Modules that run the plan's steps themselves, so that tensors between are not seen."""


class Follower:
    """One run, whose model reports the tensors at the boundaries of its modules.

    Args:
        model: unsharded, or of one rank.
        turn: the run's right to go on; outside of a backward pass it waits at modules with parameters.
        comparison: it gets the tensors.
    """

    def __init__(self, model: nn.Module, turn: Turn, comparison: ModuleComparison) -> None:
        self.turn = turn
        self.comparison = comparison
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
            return self._inputs(BEFORE, names, args, kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._report(AFTER, "output", output)
            self.leave(fqn)

        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave)
        if entry is None or isinstance(module, WITH_STEPS_INSIDE):
            return
        if entry.inputs:
            module.register_forward_pre_hook(
                lambda module, args, kwargs: self._inputs(AFTER, names, args, kwargs), with_kwargs=True
            )
        if entry.outputs and self.comparison.gradients:
            module.register_forward_hook(
                lambda module, args, output: self._report(BEFORE, "output", output) and None, prepend=True
            )

    def enter(self, fqn: str, *, waits: bool) -> None:
        """Note that a call begins. If it ``waits``, runs that have not reached it go on first."""
        number = self._num_calls[fqn] = self._num_calls.get(fqn, -1) + 1
        self.open.append((fqn, number))
        position = self.comparison.enter(self.turn.number, self.open[-1])
        if waits and position is not None and not self.comparison.gradients:
            self.turn.wait_for_others(position)

    def leave(self, fqn: str) -> None:
        """Note that a call has ended, and with it calls that have failed in it."""
        while self.open:
            call = self.open.pop()
            if call[0] == fqn:
                self.comparison.leave(self.turn.number, call)
                return

    def _inputs(self, side: str, names: Sequence[str], args: Any, kwargs: Any) -> Any:
        """Report the arguments of a call; return them with other tensors for the gradients of this call."""
        named = {names[i] if i < len(names) else str(i): each for i, each in enumerate(args)} | kwargs
        if not self.comparison.gradients or side == AFTER:
            self._report(side, "input", named)
            return None
        # The gradient of a tensor is the sum over all of its readers; of a view, of this reader alone.
        named = {name: _viewed(value) for name, value in named.items()}
        self._report(side, "input", named)
        values = list(named.values())
        return tuple(values[: len(args)]), dict(list(named.items())[len(args) :])

    def _report(self, side: str, prefix: str, value: Any) -> bool:
        caller = self.open[-2][0] if len(self.open) > 1 else ""
        for slot, tensor in tensor_slots(prefix, value):
            observed = Observation(*self.open[-1], slot, side, caller)
            if not self.comparison.gradients:
                if tensor.is_floating_point():
                    self.comparison.report(self.turn.number, observed, tensor)
            elif tensor.requires_grad:
                tensor.register_hook(partial(self._reported, observed))  # type: ignore[no-untyped-call]
        return True

    def _reported(self, observed: Observation, gradient: Tensor) -> None:
        self.comparison.report(self.turn.number, observed, gradient)

    def _accumulated(self, observed: Observation, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.comparison.report(self.turn.number, observed, parameter.grad)


def _viewed(value: Any) -> Any:
    """Return a view of a tensor, or of the tensors in a tuple."""
    if isinstance(value, Tensor):
        return value.view_as(value) if value.requires_grad else value
    return tuple(map(_viewed, value)) if type(value) is tuple else value
