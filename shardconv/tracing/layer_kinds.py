"""Find out which layers of a stack do the same, by comparing their events independently of the layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .ints import Expr, TracedInt
from .tape import (
    Event,
    Mark,
    Ref,
    Tape,
    TensorInfo,
    TracedIntCall,
    depending_on,
    last_calls,
    prefixes,
    reads_and_writes,
)

_FILLED = frozenset({"aten.zeros", "aten.ones", "aten.full"})
"""Operators that make a tensor of one number."""
_SAME = frozenset({"aten.detach", "aten.alias"})
"""Operators whose result is their operand."""

_SCALING = frozenset({"aten.mul", "aten.div"})
"""Operators that may scale by another number in each layer, such as one that depends on the depth."""


@dataclass
class Segment:
    """The events of one layer's call."""

    fqn: str
    start: int
    stop: int
    made: list[int] = field(default_factory=list)
    """Tensors that it makes, in order. Equal positions correspond in layers of one kind."""
    outside: list[int] = field(default_factory=list)
    """Tensors that it reads and does not make, in order of first use."""
    kind: int = -1


def segments_of(tape: Tape, calls: list[int]) -> list[Segment]:
    """Return the events of each call, without calls that have no events (of dropped layers)."""
    last = last_calls(tape)
    events_of: dict[int, list[int]] = {}
    for position, event in enumerate(tape.events):
        events_of.setdefault(event.call, []).append(position)
    found = ((c, [p for i in range(c, last[c] + 1) for p in events_of.get(i, ())]) for c in calls)
    return [Segment(tape.calls[c].fqn, min(own), max(own) + 1) for c, own in found if own]


def made_alike(tape: Tape) -> dict[int, tuple[str, str, str, TensorInfo]]:
    """Return the tensors that are filled with one number, such as states. Equal tensors have equal values."""
    found: dict[int, tuple[str, str, str, TensorInfo]] = {}
    for event in tape.events:
        if isinstance(event, Mark):
            continue
        base = event.name.rpartition(".")[0]
        if base in _FILLED and not event.inputs:
            made = tape.tensors[event.outputs[0]]
            found[event.outputs[0]] = event.name, repr(event.args), repr(event.kwargs), made
        elif base in _SAME and event.inputs[0] in found:
            found[event.outputs[0]] = found[event.inputs[0]]
    return found


class _States:
    """The tensors of ``made_alike``, described independently of the layers that read them."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.made = made_alike(tape)
        self.replays = {t: r for r in tape.replays for t in r.outputs if t in self.made}

    def key(self, segment: Segment, tid: int) -> Any:
        """Return a key that is equal for tensors that two layers may read in the same role.

        They are filled alike, with sizes from the same attributes of the layer or of other modules.
        """
        made = self.made.get(tid)
        if made is None:
            return tid
        replay = self.replays.get(tid)
        sizes = None if replay is None else _LayerSignature(self.tape, segment)._value(replay.args)
        return made, sizes


def classify(tape: Tape, segments: list[Segment]) -> None:
    """Number the kinds of layers.

    Layers of a kind have equal signatures, read the same tensors from outside of the stack, and make the same
    tensors that are read behind it.
    """
    signatures = _signatures(tape, segments)
    owner = {t: i for i, s in enumerate(segments) for t in s.made}
    passed: dict[int, set[int]] = {}
    for signature, segment in zip(signatures, segments, strict=True):
        passed.setdefault(signature, set()).update(p for p, t in enumerate(segment.outside) if t in owner)
    # A layer may read a tensor in place of another layer's tensor of the same shape if it is empty, such as
    # an empty cache, or if it is one number, such as the length of a layer's cache: this cannot be sharded,
    # and as it depends on no parameter, it is not partial either.
    parameters = (t for t, info in enumerate(tape.tensors) if info.kind == "parameter")
    weighted = depending_on(tape, parameters)
    numel = [math.prod(info.shape) for info in tape.tensors]
    alike = {t for t, n in enumerate(numel) if n == 0 or (n == 1 and t not in weighted)}
    equal = _States(tape)
    returned = _read_behind(tape, segments)
    kinds: dict[Any, int] = {}
    for signature, segment, read in zip(signatures, segments, returned, strict=True):
        shared = tuple(
            equal.key(segment, t)
            for p, t in enumerate(segment.outside)
            if p not in passed[signature]
            and not tape.tensors[t].name.startswith(segment.fqn + ".")
            and t not in alike
        )
        segment.kind = kinds.setdefault((signature, shared, read), len(kinds))


def alike(tape: Tape, segments: list[Segment]) -> list[list[Segment]]:
    """Group the layers that do the same, with any tensors from outside."""
    groups: dict[int, list[Segment]] = {}
    for signature, segment in zip(_signatures(tape, segments), segments, strict=True):
        groups.setdefault(signature, []).append(segment)
    return list(groups.values())


def _signatures(tape: Tape, segments: list[Segment]) -> list[int]:
    """Return a number for each layer, equal for layers that do the same, and set the segments' tensors."""
    replays: dict[str, list[TracedIntCall]] = {}
    names = {s.fqn for s in segments}
    for replay in tape.replays:
        layer = next((p for p in prefixes(replay.fqn) if p in names), None)
        if layer is not None:
            replays.setdefault(layer, []).append(replay)
    numbers: dict[Any, int] = {}
    computed = (_LayerSignature(tape, s).compute(replays.get(s.fqn, ())) for s in segments)
    return [numbers.setdefault(signature, len(numbers)) for signature in computed]


def _read_behind(tape: Tape, segments: list[Segment]) -> list[frozenset[int]]:
    """Return the positions of each layer's tensors that are read behind the stack or between its layers.

    Positions that each layer passes to the next one do not count for the last layer.
    """
    starts = [*(s.start for s in segments[1:]), len(tape.events)]
    others = (tape.events[s.stop : start] for s, start in zip(segments, starts, strict=True))
    behind = {t for events in others for event in events for t in reads_and_writes(event)[0]}
    behind.update(tape.outputs, tape.handed_back)
    positions = [{t: p for p, t in enumerate(s.made)} for s in segments]
    passed = {
        where[t] for where, s in zip(positions, segments[1:], strict=False) for t in s.outside if t in where
    }
    found = [{p for t, p in where.items() if t in behind} for where in positions]
    return [*map(frozenset, found[:-1]), frozenset(found[-1] - passed)]


class _LayerSignature:
    """A layer's events, described independently of the layer."""

    def __init__(self, tape: Tape, segment: Segment) -> None:
        self.tape = tape
        self.segment = segment
        self.position: dict[int, int] = {}
        self.outside: dict[int, int] = {}

    def compute(self, replays: Sequence[TracedIntCall]) -> tuple[Any, ...]:
        """Return a hashable value, and set the segment's tensors."""
        parts = [self._event(e) for e in self.tape.events[self.segment.start : self.segment.stop]]
        parts += [self._replay(r) for r in replays]
        self.segment.made = list(self.position)
        self.segment.outside = list(self.outside)
        described = tuple(self._describe(t) for t in self.outside)
        return (tuple(parts), described)

    def _event(self, event: Event) -> tuple[Any, ...]:
        fqn = self._relative(self.tape.calls[event.call].fqn)
        if isinstance(event, Mark):
            source = self._tensor(event.source)
            return (fqn, event.slots, source, self._make(event.target))
        given = event.args
        if event.name.rpartition(".")[0] in _SCALING:  # layers may scale by different numbers
            given = tuple("scale" if type(a) is float and a and math.isfinite(a) else a for a in given)
        args = self._value(given)
        kwargs = tuple((k, self._value(v)) for k, v in event.kwargs.items())
        return (fqn, event.name, args, kwargs, tuple(self._make(t) for t in event.outputs))

    def _replay(self, replay: TracedIntCall) -> tuple[Any, ...]:
        values = self._value((replay.args, tuple(replay.kwargs.items())))
        return (self._relative(replay.fqn), replay.function, values)

    def _relative(self, fqn: str) -> str:
        return fqn[len(self.segment.fqn) :]

    def _make(self, tid: int) -> Any:
        self.position[tid] = len(self.position)
        info = self.tape.tensors[tid]
        return info.shape, info.dtype

    def _tensor(self, tid: int) -> tuple[str, int]:
        position = self.position.get(tid)
        if position is not None:
            return ("made", position)
        return ("outside", self.outside.setdefault(tid, len(self.outside)))

    def _describe(self, tid: int) -> Any:
        info = self.tape.tensors[tid]
        own = info.name.startswith(self.segment.fqn + ".")
        return info.shape, info.dtype, info.kind, self._relative(info.name) if own else ""

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind is Ref:
            return self._tensor(value.tid)
        if kind is TracedInt:
            return ("int", int(value), self._expr(value.expr))
        if kind in (tuple, list) or isinstance(value, (tuple, list)):
            return tuple(self._value(v) for v in value)
        if kind is slice:
            return ("slice", *(self._value(v) for v in (value.start, value.stop, value.step)))
        if isinstance(value, float) and value != value:
            return "nan"
        return (kind.__name__, value) if kind in (int, float, bool) else value

    def _expr(self, expr: Expr | int) -> Any:
        if isinstance(expr, int):
            return expr
        if expr[0] == "attr":
            own = expr[1].startswith(self.segment.fqn)
            return ("attr", own, self._relative(expr[1]) if own else expr[1], *expr[2:])
        if expr[0] == "size":
            return ("size", self._tensor(expr[1]), expr[2])
        return (expr[0], self._expr(expr[1]), self._expr(expr[2]))
