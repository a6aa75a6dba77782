"""Fold repeated layers: keep each kind of layer once or twice on the tape, and record which ones it
represents.

The calls of numbered siblings (``layers.0``, ``layers.1`` …) are compared by everything that they do:
operators, arguments, shapes, traced ints, and the sources of their operands. Layers that do the same are of
one kind; class names and attributes are not used. The layers that stay are those with a new transition from
one kind to the next. A dropped run is replaced by the layer before it, which is of the kind of the last layer
in the run.

A layer may read tensors of the layer before it, and tensors of other layers that all layers of its kind read,
such as the keys and values that the last layers of a stack share.

All layers of a kind must get the same solution, so the layers of a kind that stay are tied, tensor by tensor.
Outputs of the model that come from each layer, such as router scores, are read from the first layer of the
kind.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .functions import Expr, TracedInt
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

# Find out which layers of a stack do the same, by comparing their events independently of the layer.


_FILLED = frozenset({"aten.zeros", "aten.ones", "aten.full"})
"""Operators that make a tensor of one number."""
_SAME = frozenset({"aten.detach", "aten.alias"})
"""Operators whose result is their operand."""
_PART = "aten.select"
"""The operator that takes a part of a tensor by its number, such as the part that is for one layer."""

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
    positions = ((c, [p for i in range(c, last[c] + 1) for p in events_of.get(i, ())]) for c in calls)
    return [Segment(tape.calls[c].fqn, min(events), max(events) + 1) for c, events in positions if events]


@dataclass(frozen=True, slots=True)
class Making:
    """How a tensor was made. Tensors of equal makings can have the same layout."""

    operator: str
    arguments: str
    """Without the number of a part."""
    info: TensorInfo
    is_part: bool
    """Whether it is a part of a tensor, and not filled with a number."""


def made_alike(tape: Tape) -> dict[int, Making]:
    """Return the tensors of which each layer may have its own, with how they were made.

    These are tensors that are filled with one number, such as states, and parts of a tensor that differ by
    their number only.
    """
    makers: dict[int, Making] = {}
    for event in tape.events:
        if isinstance(event, Mark):
            continue
        is_part = event.base == _PART
        if is_part or (event.base in _FILLED and not event.inputs):
            arguments = repr((event.args[:2] if is_part else event.args, event.kwargs))
            info = tape.tensors[event.outputs[0]]
            makers[event.outputs[0]] = Making(event.name, arguments, info, is_part)
        elif event.base in _SAME and event.inputs[0] in makers:
            makers[event.outputs[0]] = makers[event.inputs[0]]
    return makers


class _States:
    """The tensors of ``made_alike``, described independently of the layers that read them."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.made = made_alike(tape)
        # The number of a part may come from the layer, and need not be equal.
        filled = {t for t, making in self.made.items() if not making.is_part}
        self.replays = {t: r for r in tape.replays for t in r.outputs if t in filled}

    def key(self, segment: Segment, tid: int) -> Any:
        """Return a key that is equal for tensors that two layers may read in the same role.

        They were made alike, and filled ones with sizes from the same attributes of the layer or of other
        modules.
        """
        made = self.made.get(tid)
        if made is None:
            return tid
        replay = self.replays.get(tid)
        sizes = None if replay is None else _LayerSignature(self.tape, segment)._value(replay.args)
        return made, sizes


def classify(tape: Tape, segments: list[Segment]) -> None:
    """Number the kinds of layers.

    Layers of a kind have equal signatures, read the same tensors from outside of the stack and from layers
    that are not the one before them, and make the same tensors that are read behind the stack or by layers
    that are not the next one.
    """
    signatures = _signatures(tape, segments)
    owner = {t: i for i, s in enumerate(segments) for t in s.made}
    passed: dict[int, set[int]] = {}
    far = [{t for t in s.outside if owner.get(t, i - 1) != i - 1} for i, s in enumerate(segments)]
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
    returned = _read_behind(tape, segments, set().union(*far))
    kinds: dict[Any, int] = {}
    for signature, segment, read, others in zip(signatures, segments, returned, far, strict=True):
        shared = tuple(
            (p, equal.key(segment, t))
            for p, t in enumerate(segment.outside)
            if (p not in passed[signature] or t in others)
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


def _read_behind(tape: Tape, segments: list[Segment], far: Collection[int]) -> list[frozenset[int]]:
    """Return the positions of each layer's tensors that are read behind the stack or between its layers.

    So are the tensors of ``far``, which layers other than the next one read. Positions that each layer passes
    to the next one do not count for the last layer.
    """
    starts = [*(s.start for s in segments[1:]), len(tape.events)]
    events_between = (tape.events[s.stop : start] for s, start in zip(segments, starts, strict=True))
    behind = {t for events in events_between for event in events for t in reads_and_writes(event)[0]}
    behind.update(tape.outputs, tape.handed_back, far)
    positions = [{t: p for p, t in enumerate(s.made)} for s in segments]
    passed = {
        where[t] for where, s in zip(positions, segments[1:], strict=False) for t in s.outside if t in where
    }
    positions_read = [{p for t, p in where.items() if t in behind} for where in positions]
    return [*map(frozenset, positions_read[:-1]), frozenset(positions_read[-1] - passed)]


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
            return (fqn, event.ports, source, self._make(event.target))
        event_args = event.args
        if event.base in _SCALING:  # layers may scale by different numbers
            event_args = tuple(
                "scale" if type(a) is float and a and math.isfinite(a) else a for a in event_args
            )
        args = self._value(event_args)
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
        is_inside = info.name.startswith(self.segment.fqn + ".")
        return info.shape, info.dtype, info.kind, self._relative(info.name) if is_inside else ""

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
            is_inside = expr[1].startswith(self.segment.fqn)
            return ("attr", is_inside, self._relative(expr[1]) if is_inside else expr[1], *expr[2:])
        if expr[0] == "size":
            return ("size", self._tensor(expr[1]), expr[2])
        return (expr[0], self._expr(expr[1]), self._expr(expr[2]))


NUMBERED = re.compile(r"(.*)\.(\d+)")
"""The FQN of a layer of a stack: FQN of the stack, and number of the layer."""


@dataclass(frozen=True)
class Folded:
    """A shorter tape, and how to apply its solution to the complete model."""

    tape: Tape
    ties: tuple[tuple[int, int], ...] = ()
    """Pairs of tensors that must get the same placement."""
    same: tuple[tuple[int, int], ...] = ()
    """Pairs of a state of a layer that stays and a state of a dropped layer, which get the same layout."""
    instances: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """FQN of a layer that stays -> FQNs of all layers that it represents, itself first."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """FQN of a layer that stays -> number of layers for which its costs count."""

    def layer_of(self, fqn: str) -> str:
        """Return the layer that stays and contains this module or parameter; empty if there is none."""
        return next((p for p in prefixes(fqn) if p in self.instances), "")

    def names(self, fqn: str) -> tuple[str, ...]:
        """Return all modules or parameters that this one represents."""
        layer = self.layer_of(fqn)
        if not layer:
            return (fqn,)
        return tuple(other + fqn[len(layer) :] for other in self.instances[layer])

    def representatives(self) -> dict[str, str]:
        """Map each dropped layer to the layer that represents it."""
        return {other: layer for layer, all_ in self.instances.items() for other in all_ if other != layer}

    def weight(self, fqn: str) -> float:
        """Return the number of modules or parameters for which this one counts."""
        layer = self.layer_of(fqn)
        return self.weights[layer] if layer else 1.0


def fold(tape: Tape, first_apart: bool = False) -> Folded:
    """Fold every stack of numbered layers.

    If layers of a stack contain stacks, the outermost stack that can be folded is folded.
    """
    # Calls of numbered siblings, three or more. Outer stacks come before the stacks in their layers.
    stacks: dict[tuple[int, str], list[int]] = {}
    for index, call in enumerate(tape.calls):
        match = NUMBERED.fullmatch(call.fqn)
        if match and call.index == 0:
            stacks.setdefault((call.parent, match[1]), []).append(index)
    result = Folded(tape)
    members: set[int] = set()
    for calls in (calls for calls in stacks.values() if len(calls) > 2):
        around = calls[0]
        while around >= 0 and around not in members:
            around = tape.calls[around].parent
        if around >= 0:
            continue  # in a layer that was folded
        folded = _fold_stack(result.tape, segments_of(result.tape, calls), first_apart)
        if folded is not None:
            members.update(calls)
            shorter, ties, same, instances, weights = folded
            result = Folded(
                shorter,
                result.ties + ties,
                result.same + same,
                {**result.instances, **instances},
                {**result.weights, **weights},
            )
    return result


_Pairs = tuple[tuple[int, int], ...]
_Result = tuple[Tape, _Pairs, _Pairs, dict[str, tuple[str, ...]], dict[str, float]]


def _fold_stack(tape: Tape, segments: list[Segment], first_apart: bool) -> _Result | None:
    pairs = list(itertools.pairwise(segments))
    if any(a.stop > b.start for a, b in pairs):
        return None
    classify(tape, segments)
    new_kinds = itertools.count(1 + max(segment.kind for segment in segments))
    if first_apart:
        segments[0].kind = next(new_kinds)
    # If other code runs between the layers, only layers that read something of the one before them can be
    # dropped, and only layers of which the next one reads something.
    if any(a.stop != b.start for a, b in pairs):
        for before, segment in pairs:
            if set(before.made).isdisjoint(segment.outside):
                before.kind, segment.kind = next(new_kinds), next(new_kinds)
    # Layers of a kind that follow layers of a kind must read the same tensors of these.
    segments_of_kind: dict[tuple[int, int], list[int]] = {}
    for before, segment in pairs:
        positions = {t: i for i, t in enumerate(before.made)}
        read = [positions.get(t, -1) for t in segment.outside]
        if segments_of_kind.setdefault((before.kind, segment.kind), read) != read:
            return None
    represented = _kept(segments)
    if len(represented) == len(segments):
        return None
    in_layers = {t for s in segments for t in s.made}
    states = made_alike(tape).keys() - in_layers
    gone = [s for i, s in enumerate(segments) if i not in represented]
    first: dict[int, Segment] = {}
    ties: list[tuple[int, int]] = []
    for segment in (segments[i] for i in represented):
        like = first.setdefault(segment.kind, segment)
        if like is not segment:
            ties += zip(like.made, segment.made, strict=True)
            ties += [(a, b) for a, b in zip(like.outside, segment.outside, strict=True) if a != b]
    # For each state that other code made for a dropped layer: the state of the first layer of its kind.
    outside = (pair for s in gone for pair in zip(first[s.kind].outside, s.outside, strict=True))
    same = tuple((a, b) for a, b in outside if a != b and b in states)
    instances = {segments[i].fqn: [segments[i].fqn] for i in represented}
    for segment in gone:
        instances[first[segment.kind].fqn].append(segment.fqn)
    total = Counter(segment.kind for segment in segments)
    stay = Counter(segments[i].kind for i in represented)
    return (
        _shortened(tape, segments, represented, first, states),
        tuple(ties),
        same,
        {layer: tuple(names) for layer, names in instances.items()},
        {segments[i].fqn: total[segments[i].kind] / stay[segments[i].kind] for i in represented},
    )


def _kept(segments: list[Segment]) -> list[int]:
    """Return the indices of the layers that stay: every transition between kinds once."""
    kinds = [s.kind for s in segments]
    seen: set[tuple[int, int]] = set()
    numbers = [0]
    current = 0
    while current < len(kinds) - 1:
        skip = current
        for later in range(current + 1, len(kinds)):
            if (kinds[later - 1], kinds[later]) not in seen:
                break
            if kinds[later] == kinds[current]:
                skip = later
        following = skip + 1
        if following < len(kinds):
            seen.add((kinds[skip], kinds[following]))
            numbers.append(following)
        current = following
    return numbers


def _shortened(
    tape: Tape,
    segments: list[Segment],
    kept: list[int],
    first: Mapping[int, Segment],
    states: Collection[int],
) -> Tape:
    """Return the tape without the dropped layers. The results of the kept layer before replace theirs.

    Results that are only read by code behind the stack or between its layers come from the ``first`` layer of
    their kind. States of dropped layers, which other code makes, come from there too. The computation of
    their sizes need not be localized.
    """
    gone = [s for i, s in enumerate(segments) if i not in kept]
    rename = {t: r for s in gone for t, r in zip(s.made, first[s.kind].made, strict=True)}
    dropped: set[int] = set()
    for index, following in zip(kept, [*kept[1:], len(segments)], strict=True):
        replaced = segments[following - 1]
        if following - 1 != index:
            rename.update(zip(replaced.made, segments[index].made, strict=True))
        for segment in segments[index + 1 : following]:
            dropped.update(range(segment.start, segment.stop))
    gone_fqns = {s.fqn for s in gone}
    gone_names = tuple(f"{fqn}." for fqn in gone_fqns)
    events = [_renamed(e, rename) for p, e in enumerate(tape.events) if p not in dropped]
    shared = {t for i in kept for t in segments[i].outside}
    own_states = {t for s in gone for t in s.outside if t in states and t not in shared}
    replays = [
        replace(
            r,
            args=_renamed_value(r.args, rename),
            kwargs={k: _renamed_value(v, rename) for k, v in r.kwargs.items()},
        )
        for r in tape.replays
        if r.fqn not in gone_fqns and not r.fqn.startswith(gone_names) and own_states.isdisjoint(r.outputs)
    ]
    outputs, handed_back = (
        tuple(rename.get(t, t) for t in tids) for tids in (tape.outputs, tape.handed_back)
    )
    return replace(tape, events=events, replays=replays, outputs=outputs, handed_back=handed_back)


def _renamed(event: Event, rename: Mapping[int, int]) -> Event:
    if isinstance(event, Mark):
        if event.source in rename:
            return replace(event, source=rename[event.source])
        return event
    if not any(t in rename for t in event.inputs):
        return event
    return replace(
        event,
        args=_renamed_value(event.args, rename),
        kwargs={k: _renamed_value(v, rename) for k, v in event.kwargs.items()},
        inputs=tuple(rename.get(t, t) for t in event.inputs),
    )


def _renamed_value(value: Any, rename: Mapping[int, int]) -> Any:
    if isinstance(value, Ref):
        return Ref(rename.get(value.tid, value.tid))
    if type(value) is TracedInt:
        return TracedInt(int(value), _renamed_expr(value.expr, rename))
    if type(value) in (tuple, list):
        return type(value)(_renamed_value(v, rename) for v in value)
    if isinstance(value, slice):
        return slice(*(_renamed_value(v, rename) for v in (value.start, value.stop, value.step)))
    return value


def _renamed_expr(expr: Any, rename: Mapping[int, int]) -> Any:
    if isinstance(expr, int) or expr[0] == "attr":
        return expr
    if expr[0] == "size":
        return ("size", rename.get(expr[1], expr[1]), expr[2])
    return (expr[0], _renamed_expr(expr[1], rename), _renamed_expr(expr[2], rename))
