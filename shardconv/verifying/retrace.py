"""Compare the tape of a model on other shapes with the global tape, operator by operator.

Every shape and every position must be the expected one, and every number the same.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from shardconv_runtime.errors import PlanError, SolveError
from shardconv_runtime.format.module_steps import layout_of
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import Plan, module_plans, parameter_plans
from shardconv_runtime.format.slices import local_size
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..dim_analysis import view_rules
from ..dim_analysis.composite_modules import leave_out
from ..dim_analysis.dim_trees import Node, leaves
from ..dim_analysis.rules import RULES
from ..inputs.trace_inputs import TraceInputs
from ..planning.conflict import Conflict
from ..planning.layout import Layouts, Shapes
from ..simulation.layer_bypass import Bypass, BypassedRank, bypass, planned_alike, repeat_results
from ..simulation.model_runs import PRECISIONS
from ..simulation.module_comparison import Follower, ModuleComparison, Observation
from ..simulation.rank_threads import MetaCommunicator
from ..tracing.tape import ALIAS_WRITE, Mark, Op, Tape, tensors_read
from ..tracing.trace import trace

_SHAPED = frozenset(
    {
        "aten.view",
        "aten.reshape",
        "aten._unsafe_view",
        "aten.expand",
        "aten.broadcast_to",
        "aten.repeat",
        "aten.repeat_interleave",
        "aten.convolution",
        "aten.zeros",
        "aten.ones",
        "aten.full",
        "aten.empty",
        "aten.new_zeros",
        "aten.new_ones",
        "aten.new_full",
        "aten.new_empty",
        "aten.split",
        "aten.split_with_sizes",
        "aten.chunk",
        "aten.unflatten",
        "aten.flatten",
        "aten.new_empty_strided",
        "aten.empty_strided",
        "aten.rand",
        "aten.randn",
        "aten.layer_norm",
        "aten.rms_norm",
        "aten.embedding",
    }
)
"""Operators whose ints only determine their output's shape, which is compared anyway, or only affect
gradients: a rank without the padding row of an embedding has no padding id."""


def compare_tapes(
    shapes: Shapes,
    other: Tape,
    changed: Collection[str],
    rank: int = 0,
    *,
    numbers: bool = True,
    left_out: Collection[str] = (),
    pass_on: bool = False,
) -> Conflict | None:
    """Return the first difference between a tape and the expected one; None if there is none."""
    return _Comparison(shapes, other, changed, rank, numbers, pass_on, lacks_results=False).run(left_out)


class _Comparison:
    """The comparison of the global tape with another one."""

    def __init__(
        self,
        shapes: Shapes,
        local: Tape,
        changed: Collection[str],
        rank: int,
        numbers: bool,
        pass_on: bool,
        lacks_results: bool,
    ) -> None:
        self.shapes = shapes
        self.unsharded = shapes.analysis.tape
        self.local = local
        self.changed = changed
        self.rank = rank
        self.numbers = numbers
        self.pass_on = pass_on
        self.lacks_results = lacks_results
        """Whether code collects results of layers, and the other model lacks those of layers that were left
        out. In the global tape, these are the results of the layers that represent them, once more."""
        self.read = tensors_read(self.unsharded).union(self.unsharded.outputs)
        """Tensors that are read. Results that are never read only tell how many positions a mask selects."""

    def run(self, left_out: Collection[str]) -> Conflict | None:
        """Return the first difference; None if there is none."""
        expected, local_events = self._by_call(self.unsharded), self._by_call(self.local)
        if self.lacks_results:
            repeated = _repeated_marks(self.unsharded)
            for events in expected.values():
                events[:] = [e for e in events if not isinstance(e, Mark) or e.target not in repeated]
        for key, events in expected.items():
            if key[0] in left_out:
                continue
            conflict = self._align(key[0], events, local_events.get(key, []))
            if conflict is not None:
                return conflict
        return None

    def innermost(self, fqn: str, where: str) -> str:
        """Say where the first module in this one differs, if any: its code may have made the problem."""
        expected, local_events = self._by_call(self.unsharded), self._by_call(self.local)
        for key, events in expected.items():
            if key[0].startswith(f"{fqn}." if fqn else "") and key[0] != fqn:
                conflict = self._align(key[0], events, local_events.get(key, []))
                if conflict is not None:
                    return self.innermost(key[0], conflict.where)
        return where

    def _align(self, fqn: str, events: list[Op | Mark], mine: list[Op | Mark]) -> Conflict | None:
        """Pair the operators of one call. A rank may leave out views, such as repeating a group of one."""
        position = 0
        skipped: list[Op | Mark] = []
        for event in events:
            other = mine[position] if position < len(mine) else None
            if other is not None and self._same_kind(event, other) and not self._is_skipped(event, other):
                conflict = self._compare(fqn, event, other)
                if conflict is not None:
                    return conflict
                # One mark of the other model may be several marks here; its last port ends it.
                if (
                    not isinstance(event, Mark)
                    or not isinstance(other, Mark)
                    or other.ports[-1] in event.ports
                ):
                    position += 1
            elif isinstance(event, Op) and self._moves_only(event):
                skipped.append(event)
            else:
                runs = "nothing more" if other is None else _label(other)
                problem = f"runs {runs} on a rank where the unsharded model runs {_label(event)}"
                return self._conflict(fqn, [*skipped, event], problem)
        if position < len(mine):
            problem = f"runs {_label(mine[position])} on a rank, which the unsharded model does not"
            return self._conflict(fqn, skipped or events, problem)
        return None

    def _same_kind(self, event: Op | Mark, other: Op | Mark) -> bool:
        if isinstance(event, Mark) or isinstance(other, Mark):
            if not isinstance(event, Mark) or not isinstance(other, Mark):
                return False
            return event.ports == other.ports or (self.pass_on and set(event.ports) <= set(other.ports))
        return event.name == other.name and len(event.outputs) == len(other.outputs)

    def _is_skipped(self, event: Op | Mark, other: Op | Mark) -> bool:
        """Return whether a view here belongs to a later one on the rank, since the shape is not the expected
        one."""
        if not isinstance(event, Op) or not isinstance(other, Op) or not self._moves_only(event):
            return False
        want = [self.shapes.local_shape(t, self.rank) for t in event.outputs]
        return want != [self.local.tensors[t].shape for t in other.outputs]

    def _moves_only(self, op: Op) -> bool:
        base = op.base
        if base == "aten.slice":
            return self.unsharded.tensors[op.inputs[0]].shape == self.unsharded.tensors[op.outputs[0]].shape
        return base in view_rules.RULES or base in ("aten.contiguous", "aten.alias", "aten.clone")

    def _by_call(self, tape: Tape) -> dict[tuple[str, int], list[Op | Mark]]:
        """Group the events by module call; of replaced modules, only their outputs are events.

        Calls are counted among the calls on the tape: a module that several layers share is also called by
            layers
        that were left out. Notes of writes through aliases are not compared, since they are recorded at the
        next read, which may be a step of the plan.
        """
        out: dict[tuple[str, int], list[Op | Mark]] = {}
        numbers: dict[str, dict[int, int]] = {}
        for event in tape.events:
            call = tape.calls[event.call]
            if isinstance(event, Op):
                is_own = event.origin.startswith("shardconv") or event.name == ALIAS_WRITE
                if call.fqn in self.changed or is_own:
                    continue
            elif call.fqn in self.changed and not event.is_output:
                continue
            counted = numbers.setdefault(call.fqn, {})
            number = counted.setdefault(call.index, len(counted))
            out.setdefault((call.fqn, number), []).append(event)
        return out

    def _compare(self, fqn: str, event: Op | Mark, other: Op | Mark) -> Conflict | None:
        if isinstance(event, Mark) or isinstance(other, Mark):
            if isinstance(event, Mark) and isinstance(other, Mark):
                return self._compare_tensor(fqn, event, event.target, other.target)
            return None
        for want, got in zip(event.outputs, other.outputs, strict=True):
            if want not in self.read:
                continue
            conflict = self._compare_tensor(fqn, event, want, got)
            if conflict is not None:
                return conflict
        is_slice = event.name == "aten.slice.Tensor"
        is_known = event.outputs and event.outputs[0] in self.shapes.analysis.dims
        if not is_known or event.base in _SHAPED or not (self.numbers or is_slice):
            return None
        expected = self._positions(event) if is_slice else _numbers(event)
        local_numbers: list[Any] = _numbers(other)
        if is_slice:
            local_numbers = list(_slice(other, self.local.tensors[other.inputs[0]].shape)[1:])
        if expected == local_numbers:
            return None
        problem = f"{event.name} is given {local_numbers} on rank {self.rank}, expected {expected}"
        return self._conflict(fqn, [event], problem)

    def _compare_tensor(self, fqn: str, event: Op | Mark, want: int, got: int) -> Conflict | None:
        if want not in self.shapes.analysis.dims:
            return None
        local, expected = self.local.tensors[got], self.shapes.local_shape(want, self.rank)
        dtype = self.unsharded.tensors[want].dtype
        if local.shape != expected:
            problem = f"{_label(event)} has shape {local.shape} on rank {self.rank}, expected {expected}"
            return self._conflict(fqn, [event], problem)
        if local.dtype != dtype:
            problem = f"{_label(event)} has dtype {local.dtype} on rank {self.rank}, expected {dtype}"
            return self._conflict(fqn, [event], problem)
        return None

    def _positions(self, op: Op) -> list[int | None]:
        """Return the local start, stop and step of a slice."""
        tid = op.inputs[0]
        dim, start, stop, step = _slice(op, self.unsharded.tensors[tid].shape)
        changed = any(self.shapes.changed(x) for x in leaves(self.shapes.analysis.dims[tid][dim]))
        if not changed or step != 1:
            size = self.shapes.local_shape(tid, self.rank)[dim]
            full = self.unsharded.tensors[tid].shape[dim]
            return [start, stop if stop != full else size, step]
        return [*(self.shapes.position(tid, dim, p, self.rank) for p in (start, stop)), step]

    def _conflict(self, fqn: str, events: Iterable[Op | Mark], problem: str) -> Conflict:
        nodes: dict[Node, None] = {}
        for event in events:
            tids = (
                (event.source, event.target) if isinstance(event, Mark) else (*event.inputs, *event.outputs)
            )
            for tid in tids:
                for dim in self.shapes.analysis.dims.get(tid, ()):
                    nodes |= {x: None for x in leaves(dim) if self.shapes.changed(x)}
        return Conflict(tuple(nodes), f"{fqn} {problem}")


def _repeated_marks(tape: Tape) -> set[int]:
    """Return the targets of marks of tensors that have a mark at the same side of the call already."""
    first: dict[tuple[int, int, bool], int] = {}
    same: dict[int, int] = {}
    for event in tape.events:
        if isinstance(event, Mark):
            source = same.get(event.source, event.source)
            target = first.setdefault((event.call, source, event.is_output), event.target)
            if target != event.target:
                same[event.target] = target
    return set(same)


def _label(event: Op | Mark) -> str:
    return event.name if isinstance(event, Op) else event.ports[0]


def _numbers(op: Op) -> list[Any]:
    values = pytree.tree_leaves((op.args, op.kwargs))
    return [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]


def _slice(op: Op, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    names = ("dim", "start", "end", "step")
    arguments = dict(zip(names, op.args[1:], strict=False)) | {
        k: v for k, v in op.kwargs.items() if k in names
    }
    dim = arguments.get("dim", 0) % len(shape)
    start, stop, step = slice(arguments.get("start"), arguments.get("end"), arguments.get("step")).indices(
        shape[dim]
    )
    return dim, start, max(start, stop), step


# Each rank's model is traced and compared with the global tape before a byte is written.
#
# The runtime's own code applies the plan to a copy of the model, with collectives that only compute shapes.
# The tape of the result must agree with the global one, operator by operator.


def retrace(
    plan: Plan,
    layouts: Layouts,
    model: nn.Module,
    inputs: TraceInputs,
    bypassed: Mapping[str, Bypass] | None = None,
) -> Conflict | None:
    """Compare the tapes of ranks' models, one for each kind of rank, with the global one."""
    # The numerical check does not see dtypes, since simulated ranks have all parameters in one.
    dtypes = {name: getattr(torch, entry.dtype) for name, entry in parameter_plans(plan).items()}
    for name, tensor in stored_tensors(model):
        dtype = dtypes.get(name, tensor.dtype)  # aliases have none
        if tensor.dtype != dtype:
            raise PlanError(f"{name}: the plan says {dtype}, the model has {tensor.dtype}")
    alike = planned_alike(plan, bypassed or {})
    left_out = {fqn: how for fqn, how in alike.items() if not how.is_read_elsewhere}
    repeated = {f"{fqn}.{name}": f"{how.like}.{name}" for fqn, how in alike.items() for name in how.closed}
    for rank in _unlike_ranks(plan):
        if len(left_out) < len(alike):  # code may work without the results of some layers that it collects
            fewest = _RankRun(plan, layouts, model, inputs, alike, rank)
            if fewest.conflict({}) is None:
                continue
        run = _RankRun(plan, layouts, model, inputs, left_out, rank)
        conflict = run.conflict(repeated)
        if conflict is not None and repeated:  # a model may depend on modules that are not run
            conflict = run.conflict({})
        if conflict is not None:
            return conflict
    return None


@dataclass(frozen=True)
class _RankRun:
    """The trace of one rank."""

    plan: Plan
    layouts: Layouts
    model: nn.Module
    inputs: TraceInputs
    left_out: Mapping[str, Bypass]
    rank: int

    def conflict(self, repeated: Mapping[str, str]) -> Conflict | None:
        """Return the first difference from the global tape."""
        rank = BypassedRank(self.plan, self.model, self.left_out, self._comm)
        conflict = self._difference(rank.module, repeated)
        if rank.is_exact:
            return conflict
        local = parallelize(copy.deepcopy(self.model), self.plan, self._comm)
        return self._difference(bypass(local, self.left_out), repeated)

    @property
    def _comm(self) -> MetaCommunicator:
        return MetaCommunicator(self.rank, self.plan.mesh)

    def _difference(self, local: nn.Module, repeated: Mapping[str, str]) -> Conflict | None:
        plan, layouts = self.plan, self.layouts
        changed = {
            fqn
            for fqn, module in local.named_modules()
            if fqn not in self.left_out and type(module) is not type(self.model.get_submodule(fqn))
        }
        changed |= leave_out(local, layouts.analysis.tape)
        repeat_results(local, repeated)
        try:
            tape = trace(local, self.inputs.tensors, RULES, self.inputs.options, layouts.analysis.tape)
        except SolveError as error:
            where, problem = str(error).partition(":")[0], str(error)
            if earlier := self._first_wrong_shape(local):
                problem = f"{earlier}; then {problem}"
            return Conflict(_to_blame(layouts, plan, where), problem)
        lacks_results = any(how.is_read_elsewhere for how in self.left_out.values())
        comparison = _Comparison(
            layouts, tape, changed, self.rank, True, bool(self.left_out), lacks_results=lacks_results
        )
        difference = comparison.run(())
        if difference is None:
            return None
        fqn = difference.where.partition(" ")[0]
        nodes = tuple(difference.nodes) or _to_blame(layouts, plan, fqn)
        return replace(difference, nodes=nodes, where=comparison.innermost(fqn, difference.where))

    def _first_wrong_shape(self, local: nn.Module) -> str:
        """Say which module's code has made the first tensor of another shape at a boundary."""
        comparison = _ShapeComparison(self.plan, self.layouts, self.rank)
        Follower(local, self.rank, comparison)
        with suppress(SolveError):  # it fails as it did before
            trace(local, self.inputs.tensors, RULES, self.inputs.options, self.layouts.analysis.tape)
        return f"{comparison.first.fqn}: {comparison.first.what}" if comparison.first is not None else ""


class _ShapeComparison(ModuleComparison):
    """The shapes of the tensors of one rank's modules, compared with those that are expected."""

    def __init__(self, plan: Plan, layouts: Layouts, rank: int) -> None:
        super().__init__(plan, module_plans(plan), PRECISIONS[0])
        tape = layouts.analysis.tape
        self._expected: dict[tuple[str, int, str], list[tuple[int, ...]]] = {}
        for event in tape.events:
            if isinstance(event, Mark):
                call = tape.calls[event.call]
                # An input is seen before the steps of its module as well.
                tids = (event.target,) if event.is_output else (event.target, event.source)
                shapes = [layouts.local_shape(tid, rank) for tid in tids]
                self._expected |= {(call.fqn, call.index, port): shapes for port in event.ports}

    def report(self, run: int, observed: Observation, tensor: Tensor) -> None:
        """Compare the shape of a tensor."""
        with torch._C.DisableTorchFunction():  # reading a shape is no part of the trace
            shape = tuple(map(int, tensor.shape))
        shapes = self._expected.get((observed.fqn, observed.call, observed.port), [shape])
        if self.first is None and shape not in shapes:
            self.first = self._blame(observed, math.inf)


def _unlike_ranks(plan: Plan) -> list[int]:
    """Return the first rank of each kind. Ranks of a kind have the same shapes and attributes."""
    layouts = [layout_of(step) for m in plan.modules for step in (*m.inputs, *m.outputs)]
    dims = {*(d for p in plan.parameters for d in p.dims), *(d for d in layouts if d is not None)}
    overrides = [override.local for m in plan.modules for override in m.overrides if len(override.local) > 1]
    kinds: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for rank in range(plan.tp):
        sizes = tuple(local_size(d, plan.mesh, rank) for d in dims)
        kinds.setdefault((sizes, tuple(values[rank] for values in overrides)), rank)
    return list(kinds.values())


def _to_blame(layouts: Layouts, plan: Plan, fqn: str) -> tuple[Node, ...]:
    """Return sharded leaves that may be the reason why a module's code failed on a rank.

    These are leaves of tensors that the module computes itself. If there are none (its code may check an
    attribute, or build other modules from a config), they are leaves of modules with overrides, or of modules
    in it.
    """
    overridden = {n for m in plan.modules if m.overrides for n in expand_all(m.names)}
    inside = f"{fqn}."  # the model itself is named by its class, which only the last test matches
    tests: tuple[Callable[[str], bool], ...] = (
        lambda name: name == fqn,
        lambda name: name in overridden,
        lambda name: name.startswith(inside),
        lambda name: True,
    )
    for with_inputs in (False, True):
        for test in tests:
            tape = layouts.analysis.tape
            blamed: dict[Node, None] = {}
            for event in tape.events:
                if isinstance(event, Op) and test(tape.calls[event.call].fqn):
                    for tid in (*event.inputs, *event.outputs) if with_inputs else event.outputs:
                        for dim in layouts.analysis.dims.get(tid, ()):
                            blamed |= {x: None for x in leaves(dim) if layouts.assignment.axes(x)}
            nodes = tuple(blamed)
            if nodes:
                return nodes
    return ()
