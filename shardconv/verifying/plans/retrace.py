"""Traces one rank's model and compares it with the global tape, before a byte is written.

The plan is applied to a copy of the model by the runtime's own code, with collectives as functions of
shapes. The tape of the result must agree with the global one operator by operator: every shape being
the expected local shape, every position the expected local position, every number the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import PlanError, SolveError
from shardconv_runtime.format.dims import Dim, axes_of
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import Plan, layout_of
from shardconv_runtime.format.slices import local_size, ranges
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...dim_analysis.dim_trees import Node, leaves
from ...dim_analysis.expert_sites import leave_out
from ...dim_analysis.rules import RULES, views
from ...planning.layout import Layouts
from ...planning.obstacle import Obstacle
from ...tracing.inputs import TraceInputs
from ...tracing.tape import Mark, Op, Tape
from ...tracing.trace import trace

_SHAPED = frozenset(
    {
        "aten.view",
        "aten.reshape",
        "aten._unsafe_view",
        "aten.expand",
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
"""Operators whose ints only decide their output's shape, which is compared anyway.

Or they matter to gradients alone: a rank that lacks the padding row of an embedding has no padding id.
"""


class _ShapeCommunicator(Communicator):
    """Collectives as functions of shapes, on meta tensors."""

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return torch.empty_like(x)

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x.new_empty((len(self.group(axes)) * x.shape[0], *x.shape[1:]))


def retrace(plan: Plan, layouts: Layouts, model: nn.Module, inputs: TraceInputs) -> Obstacle | None:
    """Compare the tapes of ranks' models, one for each kind of rank, with the global one.

    Args:
        plan: of the ranks' models.
        layouts: expected dims of every tensor of the global tape.
        model: the global model, on meta; it is copied.
        inputs: as for the global trace.

    Returns:
        An obstacle where a shape or a position differs, with the leaves that are sharded there; None if
        the tapes of all ranks agree.

    Raises:
        PlanError: a parameter has another dtype in the plan than in the model.
    """
    for rank in _unlike_ranks(plan):
        local = parallelize(copy.deepcopy(model), plan, _ShapeCommunicator(rank, plan.mesh))
        _require_dtypes(model, local)
        changed = {f for f, m in local.named_modules() if type(m) is not type(model.get_submodule(f))}
        changed |= leave_out(local, layouts.analysis.tape)
        try:
            tape = trace(local, inputs.tensors, RULES, inputs.options, layouts.analysis.tape)
        except SolveError as error:
            where = str(error).partition(":")[0]
            return Obstacle(_to_blame(layouts, plan, where), str(error))
        obstacle = _Comparison(layouts, plan, tape, changed, rank).run()
        if obstacle is not None:
            return obstacle
    return None


def _unlike_ranks(plan: Plan) -> list[int]:
    """The first rank of each kind: of those that hold the same shapes and get the same values."""
    layouts = [layout_of(step) for m in plan.modules for step in (*m.inputs, *m.outputs)]
    dims = {*(d for p in plan.parameters for d in p.dims), *(d for d in layouts if d is not None)}
    edits = [edit.local for m in plan.modules for edit in m.edits if len(edit.local) > 1]
    kinds: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for rank in range(plan.tp):
        sizes = tuple(local_size(d, plan.mesh, rank) for d in dims)
        kinds.setdefault((sizes, tuple(values[rank] for values in edits)), rank)
    return list(kinds.values())


def _require_dtypes(model: nn.Module, local: nn.Module) -> None:
    """Numbers do not show this: simulated ranks have all parameters in one dtype."""
    dtypes = {name: tensor.dtype for name, tensor in stored_tensors(model)}
    for name, tensor in stored_tensors(local):
        if tensor.dtype != dtypes[name]:
            raise PlanError(f"{name}: the plan says {tensor.dtype}, the model has {dtypes[name]}")


def _to_blame(layouts: Layouts, plan: Plan, fqn: str) -> tuple[Node, ...]:
    """Sharded leaves that may be why a module's code failed on a rank.

    Those of the tensors that the module computes itself; where there are none (its code may check an
    attribute, or build other modules from a config), those around edited attributes, or of modules in it.
    """
    edited = {n for m in plan.modules if m.edits for n in expand_all(m.names)}
    inside = f"{fqn}."  # for the model itself this is the name of its class, which only the last test matches
    tests: tuple[Callable[[str], bool], ...] = (
        lambda name: name == fqn,
        lambda name: name in edited,
        lambda name: name.startswith(inside),
        lambda name: True,
    )
    return next((nodes for test in tests if (nodes := _sharded_in(layouts, test))), ())


def _sharded_in(layouts: Layouts, is_meant: Callable[[str], bool]) -> tuple[Node, ...]:
    """Sharded leaves of the tensors that some modules make."""
    tape = layouts.analysis.tape
    found: dict[Node, None] = {}
    for event in tape.events:
        if isinstance(event, Op) and is_meant(tape.calls[event.call].fqn):
            for tid in event.outputs:
                for dim in layouts.analysis.dims.get(tid, ()):
                    found |= {x: None for x in leaves(dim) if layouts.assignment.axes(x)}
    return tuple(found)


class _Comparison:
    """Global tape against the tape of one rank."""

    def __init__(self, layouts: Layouts, plan: Plan, local: Tape, changed: set[str], rank: int) -> None:
        self.layouts = layouts
        self.plan = plan
        self.unsharded = layouts.analysis.tape
        self.local = local
        self.changed = changed
        self.rank = rank

    def run(self) -> Obstacle | None:
        """The first difference; None if there is none."""
        expected, found = self._by_call(self.unsharded), self._by_call(self.local)
        for key, events in expected.items():
            obstacle = self._align(key[0], events, found.get(key, []))
            if obstacle is not None:
                return obstacle
        return None

    def _align(self, fqn: str, events: list[Op | Mark], mine: list[Op | Mark]) -> Obstacle | None:
        """Pair the operators of one call. A rank may leave out views, such as repeating a group of one."""
        position = 0
        skipped: list[Op | Mark] = []
        for event in events:
            other = mine[position] if position < len(mine) else None
            if other is not None and self._same_kind(event, other) and not self._is_skipped(event, other):
                obstacle = self._compare(fqn, event, other)
                if obstacle is not None:
                    return obstacle
                position += 1
            elif isinstance(event, Op) and self._moves_only(event):
                skipped.append(event)
            else:
                runs = "nothing more" if other is None else _label(other)
                problem = f"runs {runs} on a rank where the unsharded model runs {_label(event)}"
                return self._obstacle(fqn, [*skipped, event], problem)
        if position < len(mine):
            problem = f"runs {_label(mine[position])} on a rank, which the unsharded model does not"
            return self._obstacle(fqn, skipped or events, problem)
        return None

    @staticmethod
    def _same_kind(event: Op | Mark, other: Op | Mark) -> bool:
        if isinstance(event, Mark) or isinstance(other, Mark):
            return isinstance(event, Mark) and isinstance(other, Mark) and event.slots == other.slots
        return event.name == other.name and len(event.outputs) == len(other.outputs)

    def _is_skipped(self, event: Op | Mark, other: Op | Mark) -> bool:
        """Whether a view belongs to a later one on the rank: its shape is not the expected one."""
        if not isinstance(event, Op) or not isinstance(other, Op) or not self._moves_only(event):
            return False
        want = [self.layouts.local_shape(t, self.rank) for t in event.outputs]
        return want != [self.local.tensors[t].shape for t in other.outputs]

    def _moves_only(self, op: Op) -> bool:
        base = op.name.rsplit(".", 1)[0]
        if base == "aten.slice":
            return self.unsharded.tensors[op.inputs[0]].shape == self.unsharded.tensors[op.outputs[0]].shape
        return base in views.RULES or base in ("aten.contiguous", "aten.alias", "aten.clone")

    def _by_call(self, tape: Tape) -> dict[tuple[str, int], list[Op | Mark]]:
        """Events of each module call; of replaced modules, only those of their outputs."""
        out: dict[tuple[str, int], list[Op | Mark]] = {}
        for event in tape.events:
            call = tape.calls[event.call]
            if isinstance(event, Op):
                if call.fqn in self.changed or event.origin.startswith("shardconv"):
                    continue
            elif call.fqn in self.changed and not event.is_output:
                continue
            out.setdefault((call.fqn, call.index), []).append(event)
        return out

    def _compare(self, fqn: str, event: Op | Mark, other: Op | Mark) -> Obstacle | None:
        if isinstance(event, Mark) or isinstance(other, Mark):
            if isinstance(event, Mark) and isinstance(other, Mark):
                return self._compare_tensor(fqn, event, event.target, other.target)
            return None
        for want, got in zip(event.outputs, other.outputs, strict=True):
            obstacle = self._compare_tensor(fqn, event, want, got)
            if obstacle is not None:
                return obstacle
        is_shaped = event.name.rsplit(".", 1)[0] in _SHAPED
        if not is_shaped and event.outputs and event.outputs[0] in self.layouts.analysis.dims:
            return self._compare_numbers(fqn, event, other)
        return None

    def _compare_tensor(self, fqn: str, event: Op | Mark, want: int, got: int) -> Obstacle | None:
        if want not in self.layouts.analysis.dims:
            return None
        found, expected = self.local.tensors[got], self.layouts.local_shape(want, self.rank)
        dtype = self.unsharded.tensors[want].dtype
        if found.shape != expected:
            problem = f"{_label(event)} has shape {found.shape} on rank {self.rank}, expected {expected}"
            return self._obstacle(fqn, [event], problem)
        if found.dtype != dtype:
            problem = f"{_label(event)} has dtype {found.dtype} on rank {self.rank}, expected {dtype}"
            return self._obstacle(fqn, [event], problem)
        return None

    def _compare_numbers(self, fqn: str, event: Op, other: Op) -> Obstacle | None:
        want = self._positions(event) if event.name == "aten.slice.Tensor" else _numbers(event)
        got = self._local_positions(other) if event.name == "aten.slice.Tensor" else _numbers(other)
        if want == got:
            return None
        problem = f"{event.name} is given {got} on rank {self.rank}, expected {want}"
        return self._obstacle(fqn, [event], problem)

    def _positions(self, op: Op) -> list[int]:
        """Local start, stop and step of a slice."""
        dim, start, stop, step = _slice(op, self.unsharded.tensors[op.inputs[0]].shape)
        layout = self.layouts.dims(op.inputs[0])[dim]
        if not axes_of(layout) or step != 1:
            size = self.layouts.local_shape(op.inputs[0], self.rank)[dim]
            full = self.unsharded.tensors[op.inputs[0]].shape[dim]
            return [start, stop if stop != full else size, step]
        return [self._below(layout, start), self._below(layout, stop), step]

    def _local_positions(self, op: Op) -> list[int]:
        return list(_slice(op, self.local.tensors[op.inputs[0]].shape)[1:])

    def _below(self, layout: Dim, position: int) -> int:
        """How many positions below a global one the rank holds."""
        held = ranges(layout, self.layouts.mesh, self.rank)
        return sum(max(0, min(stop, position) - start) for start, stop in held)

    def _obstacle(self, fqn: str, events: Iterable[Op | Mark], problem: str) -> Obstacle:
        nodes: dict[Node, None] = {}
        for event in events:
            tids = (
                (event.source, event.target) if isinstance(event, Mark) else (*event.inputs, *event.outputs)
            )
            for tid in tids:
                for dim in self.layouts.analysis.dims.get(tid, ()):
                    nodes |= {x: None for x in leaves(dim) if self.layouts.assignment.axes(x)}
        return Obstacle(tuple(nodes) or _to_blame(self.layouts, self.plan, fqn), f"{fqn} {problem}")


def _label(event: Op | Mark) -> str:
    return event.name if isinstance(event, Op) else event.slots[0]


def _numbers(op: Op) -> list[Any]:
    values = pytree.tree_leaves((op.args, op.kwargs))
    return [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]


def _slice(op: Op, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    names = ("dim", "start", "end", "step")
    given = dict(zip(names, op.args[1:], strict=False)) | {k: v for k, v in op.kwargs.items() if k in names}
    dim = given.get("dim", 0) % len(shape)
    start, stop, step = slice(given.get("start"), given.get("end"), given.get("step")).indices(shape[dim])
    return dim, start, max(start, stop), step
