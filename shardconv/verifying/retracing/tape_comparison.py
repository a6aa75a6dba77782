"""Compares the tape of a model on other shapes with that of the global one, operator by operator.

Every shape must be the expected one, every position the expected position, every number the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch.utils import _pytree as pytree

from ...dim_analysis.dim_trees import Node, leaves
from ...dim_analysis.rules import views
from ...planning.layout import Shapes
from ...planning.obstacle import Obstacle
from ...tracing.tape import ALIAS_WRITE, Mark, Op, Tape, tensors_read

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
"""Operators whose ints only decide their output's shape, which is compared anyway.

Or they matter to gradients alone: a rank that lacks the padding row of an embedding has no padding id.
"""


def compare_tapes(
    shapes: Shapes,
    other: Tape,
    changed: Collection[str],
    rank: int = 0,
    *,
    numbers: bool = True,
    left_out: Collection[str] = (),
    pass_on: bool = False,
) -> Obstacle | None:
    """The first difference between a tape and what is expected of it; None if there is none.

    Args:
        shapes: of the tensors of the global tape.
        other: the tape of the model on these shapes.
        changed: FQNs of modules whose inside the other model computes in another way.
        rank: whose shapes.
        numbers: compare the numbers that operators are given, too; positions always are.
        left_out: FQNs of modules whose own operators are not compared; those of modules in them are.
        pass_on: the other model has layers that return what they are given: results of several may be one.

    Returns:
        An obstacle with the changed leaves of the tensors there, which may be none.
    """
    return _Comparison(shapes, other, changed, rank, numbers, pass_on).run(left_out)


class _Comparison:
    """Global tape against another one."""

    def __init__(
        self,
        shapes: Shapes,
        local: Tape,
        changed: Collection[str],
        rank: int,
        numbers: bool,
        pass_on: bool,
    ) -> None:
        self.shapes = shapes
        self.unsharded = shapes.analysis.tape
        self.local = local
        self.changed = changed
        self.rank = rank
        self.numbers = numbers
        self.pass_on = pass_on
        self.read = tensors_read(self.unsharded).union(self.unsharded.outputs)
        """Results that nothing reads only say how many numbers a mask chooses."""

    def run(self, left_out: Collection[str]) -> Obstacle | None:
        """The first difference; None if there is none."""
        expected, found = self._by_call(self.unsharded), self._by_call(self.local)
        for key, events in expected.items():
            if key[0] in left_out:
                continue
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
                position += not self._has_more_slots(event, other)
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

    def _same_kind(self, event: Op | Mark, other: Op | Mark) -> bool:
        if isinstance(event, Mark) or isinstance(other, Mark):
            if not isinstance(event, Mark) or not isinstance(other, Mark):
                return False
            return event.slots == other.slots or (self.pass_on and set(event.slots) <= set(other.slots))
        return event.name == other.name and len(event.outputs) == len(other.outputs)

    @staticmethod
    def _has_more_slots(event: Op | Mark, other: Op | Mark) -> bool:
        """Whether one tensor of the other model is there for several: the last slot of a mark ends it."""
        if not isinstance(event, Mark) or not isinstance(other, Mark):
            return False
        return other.slots[-1] not in event.slots

    def _is_skipped(self, event: Op | Mark, other: Op | Mark) -> bool:
        """Whether a view belongs to a later one on the rank: its shape is not the expected one."""
        if not isinstance(event, Op) or not isinstance(other, Op) or not self._moves_only(event):
            return False
        want = [self.shapes.local_shape(t, self.rank) for t in event.outputs]
        return want != [self.local.tensors[t].shape for t in other.outputs]

    def _moves_only(self, op: Op) -> bool:
        base = op.name.rsplit(".", 1)[0]
        if base == "aten.slice":
            return self.unsharded.tensors[op.inputs[0]].shape == self.unsharded.tensors[op.outputs[0]].shape
        return base in views.RULES or base in ("aten.contiguous", "aten.alias", "aten.clone")

    def _by_call(self, tape: Tape) -> dict[tuple[str, int], list[Op | Mark]]:
        """Events of each module call; of replaced modules, only those of their outputs.

        Calls of a module are counted as far as the tape has them: some that several layers share are called
        by those that were left out, too. Where a tensor is noted to have been written through another is no
        part of it: that is when it is next read, be it by a step of the plan.
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

    def _compare(self, fqn: str, event: Op | Mark, other: Op | Mark) -> Obstacle | None:
        if isinstance(event, Mark) or isinstance(other, Mark):
            if isinstance(event, Mark) and isinstance(other, Mark):
                return self._compare_tensor(fqn, event, event.target, other.target)
            return None
        for want, got in zip(event.outputs, other.outputs, strict=True):
            if want not in self.read:
                continue
            obstacle = self._compare_tensor(fqn, event, want, got)
            if obstacle is not None:
                return obstacle
        is_shaped = event.name.rsplit(".", 1)[0] in _SHAPED
        if not self.numbers and event.name != "aten.slice.Tensor":
            return None
        if not is_shaped and event.outputs and event.outputs[0] in self.shapes.analysis.dims:
            return self._compare_numbers(fqn, event, other)
        return None

    def _compare_tensor(self, fqn: str, event: Op | Mark, want: int, got: int) -> Obstacle | None:
        if want not in self.shapes.analysis.dims:
            return None
        found, expected = self.local.tensors[got], self.shapes.local_shape(want, self.rank)
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

    def _positions(self, op: Op) -> list[int | None]:
        """Local start, stop and step of a slice."""
        tid = op.inputs[0]
        dim, start, stop, step = _slice(op, self.unsharded.tensors[tid].shape)
        changed = any(self.shapes.changed(x) for x in leaves(self.shapes.analysis.dims[tid][dim]))
        if not changed or step != 1:
            size = self.shapes.local_shape(tid, self.rank)[dim]
            full = self.unsharded.tensors[tid].shape[dim]
            return [start, stop if stop != full else size, step]
        return [*(self.shapes.position(tid, dim, p, self.rank) for p in (start, stop)), step]

    def _local_positions(self, op: Op) -> list[int]:
        return list(_slice(op, self.local.tensors[op.inputs[0]].shape)[1:])

    def _obstacle(self, fqn: str, events: Iterable[Op | Mark], problem: str) -> Obstacle:
        nodes: dict[Node, None] = {}
        for event in events:
            tids = (
                (event.source, event.target) if isinstance(event, Mark) else (*event.inputs, *event.outputs)
            )
            for tid in tids:
                for dim in self.shapes.analysis.dims.get(tid, ()):
                    nodes |= {x: None for x in leaves(dim) if self.shapes.changed(x)}
        return Obstacle(tuple(nodes), f"{fqn} {problem}")


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
