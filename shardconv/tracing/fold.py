"""Layers repeat: the tape with each kind of layer once or twice, and who stands for whom.

The calls of numbered siblings (``layers.0``, ``layers.1`` …) are compared by everything that they do:
operators, arguments, shapes, traced ints, and where their operands come from. Layers that do the same
are of one kind; class names and attributes are not trusted. Of a run of layers, those stay that show a
new transition from one kind to the next. A dropped run is replaced by the layer before it, which is of
the kind of the last one dropped.

All layers of a kind must get the same answer, so the copies that stay are tied, tensor by tensor.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .ints import Expr, TracedInt
from .tape import Event, Mark, Ref, Replay, Tape

_NUMBERED = re.compile(r"(.*)\.(\d+)")


@dataclass(frozen=True)
class Folded:
    """A shorter tape, and how to read its answer for the whole model."""

    tape: Tape
    ties: tuple[tuple[int, int], ...] = ()
    """Pairs of tensors that must be treated alike."""
    instances: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """FQN of a layer that stays -> FQNs of all layers that it stands for, itself first."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """FQN of a layer that stays -> how many layers its costs count for."""

    def layer_of(self, fqn: str) -> str:
        """The layer that stays and contains this module or parameter; empty if there is none."""
        return next((p for p in prefixes(fqn) if p in self.instances), "")

    def names(self, fqn: str) -> tuple[str, ...]:
        """All modules or parameters that this one stands for."""
        layer = self.layer_of(fqn)
        if not layer:
            return (fqn,)
        return tuple(other + fqn[len(layer) :] for other in self.instances[layer])

    def representatives(self) -> dict[str, str]:
        """Layer that was dropped -> layer that stands for it."""
        return {other: layer for layer, all_ in self.instances.items() for other in all_ if other != layer}

    def weight(self, fqn: str) -> float:
        """For how many modules or parameters this one counts."""
        layer = self.layer_of(fqn)
        return self.weights[layer] if layer else 1.0


@dataclass
class _Segment:
    """The events of one layer's call."""

    fqn: str
    start: int
    stop: int
    made: list[int] = field(default_factory=list)
    """Tensors that it makes, in order: equal places correspond in layers of one kind."""
    outside: list[int] = field(default_factory=list)
    """Tensors that it reads and does not make, in order of first use."""
    kind: int = -1


def fold(tape: Tape, first_apart: bool = False) -> Folded:
    """Fold every stack of numbered layers whose layers only pass tensors on to the next.

    Args:
        tape: of the model.
        first_apart: the first layer of a stack is of a kind of its own, so that what enters it may be laid
            out in another way than what enters the others.
    """
    result = Folded(tape)
    for calls in _stacks(tape):
        folded = _fold_stack(result.tape, _segments(result.tape, calls), first_apart)
        if folded is not None:
            shorter, ties, instances, weights = folded
            result = Folded(
                shorter,
                result.ties + ties,
                {**result.instances, **instances},
                {**result.weights, **weights},
            )
    return result


# Finding stacks ------------------------------------------------------------------------------------


def _stacks(tape: Tape) -> list[list[int]]:
    """Calls of numbered siblings, three or more; outermost only."""
    groups: dict[tuple[int, str], list[int]] = {}
    for index, call in enumerate(tape.calls):
        match = _NUMBERED.fullmatch(call.fqn)
        if match and call.index == 0:
            groups.setdefault((call.parent, match[1]), []).append(index)
    large = {key: calls for key, calls in groups.items() if len(calls) > 2}
    members = {c for calls in large.values() for c in calls}
    return [calls for (parent, _), calls in large.items() if not _is_inside(tape, parent, members)]


def _is_inside(tape: Tape, call: int, members: set[int]) -> bool:
    while call >= 0:
        if call in members:
            return True
        call = tape.calls[call].parent
    return False


def _segments(tape: Tape, calls: list[int]) -> list[_Segment]:
    last = _last_calls(tape)
    events_of: dict[int, list[int]] = {}
    for position, event in enumerate(tape.events):
        events_of.setdefault(event.call, []).append(position)
    return [_segment(tape, c, last[c], events_of) for c in calls]


def _last_calls(tape: Tape) -> list[int]:
    """For each call, the last call in it."""
    last = list(range(len(tape.calls)))
    for index in range(len(tape.calls) - 1, -1, -1):
        parent = tape.calls[index].parent
        if parent >= 0:
            last[parent] = max(last[parent], last[index])
    return last


def _segment(tape: Tape, first: int, last: int, events_of: Mapping[int, list[int]]) -> _Segment:
    positions = [p for call in range(first, last + 1) for p in events_of.get(call, ())]
    return _Segment(tape.calls[first].fqn, min(positions), max(positions) + 1)


# Comparing layers ----------------------------------------------------------------------------------


class _Signature:
    """What a layer does, in terms that do not depend on which layer it is."""

    def __init__(self, tape: Tape, segment: _Segment) -> None:
        self.tape = tape
        self.segment = segment
        self.place: dict[int, int] = {}
        self.outside: dict[int, int] = {}

    def compute(self, replays: Sequence[Replay]) -> tuple[Any, ...]:
        """A hashable value; fills the segment's tensors."""
        parts = [self._event(e) for e in self.tape.events[self.segment.start : self.segment.stop]]
        parts += [self._replay(r) for r in replays]
        self.segment.made = list(self.place)
        self.segment.outside = list(self.outside)
        described = tuple(self._describe(t) for t in self.outside)
        return (tuple(parts), described)

    def _event(self, event: Event) -> tuple[Any, ...]:
        fqn = self._relative(self.tape.calls[event.call].fqn)
        if isinstance(event, Mark):
            source = self._tensor(event.source)
            return (fqn, event.slots, source, self._make(event.target))
        args = self._value(event.args)
        kwargs = tuple((k, self._value(v)) for k, v in event.kwargs.items())
        return (fqn, event.name, args, kwargs, tuple(self._make(t) for t in event.outputs))

    def _replay(self, replay: Replay) -> tuple[Any, ...]:
        values = self._value((replay.args, tuple(replay.kwargs.items())))
        return (self._relative(replay.fqn), replay.function, values)

    def _relative(self, fqn: str) -> str:
        return fqn[len(self.segment.fqn) :]

    def _make(self, tid: int) -> Any:
        self.place[tid] = len(self.place)
        info = self.tape.tensors[tid]
        return info.shape, info.dtype

    def _tensor(self, tid: int) -> tuple[str, int]:
        place = self.place.get(tid)
        if place is not None:
            return ("made", place)
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


# Folding a stack -----------------------------------------------------------------------------------

_Result = tuple[Tape, tuple[tuple[int, int], ...], dict[str, tuple[str, ...]], dict[str, float]]


def _fold_stack(tape: Tape, segments: list[_Segment], first_apart: bool) -> _Result | None:
    if any(a.stop != b.start for a, b in itertools.pairwise(segments)):
        return None
    _classify(tape, segments)
    if first_apart:
        segments[0].kind = 1 + max(segment.kind for segment in segments)
    if not _only_pass_on(tape, segments):
        return None
    kept = _kept(segments)
    if len(kept) == len(segments):
        return None
    return (
        _shortened(tape, segments, kept),
        _ties(segments, kept),
        _instances(segments, kept),
        _weights(segments, kept),
    )


def _classify(tape: Tape, segments: list[_Segment]) -> None:
    """Number the kinds: equal signatures, and the same tensors from outside of the stack."""
    replays: dict[str, list[Replay]] = {}
    names = {s.fqn for s in segments}
    for replay in tape.replays:
        layer = next((p for p in prefixes(replay.fqn) if p in names), None)
        if layer is not None:
            replays.setdefault(layer, []).append(replay)
    signatures = [_Signature(tape, s).compute(replays.get(s.fqn, ())) for s in segments]
    owner = {t: i for i, s in enumerate(segments) for t in s.made}
    passed: dict[Any, set[int]] = {}
    for signature, segment in zip(signatures, segments, strict=True):
        passed.setdefault(signature, set()).update(p for p, t in enumerate(segment.outside) if t in owner)
    kinds: dict[Any, int] = {}
    for signature, segment in zip(signatures, segments, strict=True):
        shared = tuple(
            t
            for p, t in enumerate(segment.outside)
            if p not in passed[signature]
            and not tape.tensors[t].name.startswith(segment.fqn + ".")
            and 0 not in tape.tensors[t].shape  # an empty cache is as good as another
        )
        segment.kind = kinds.setdefault((signature, shared), len(kinds))


def prefixes(fqn: str) -> Iterator[str]:
    """A name and the modules that contain it, innermost first."""
    while fqn:
        yield fqn
        fqn = fqn.rpartition(".")[0]


def _only_pass_on(tape: Tape, segments: list[_Segment]) -> bool:
    """Whether each layer's tensors are read by the next one alone, and all else is read by all alike."""
    owner = {t: i for i, s in enumerate(segments) for t in s.made}
    last = len(segments) - 1
    for index, segment in enumerate(segments):
        if any(owner.get(t, index - 1) != index - 1 for t in segment.outside):
            return False
    outside = {
        t for e in (*tape.events[: segments[0].start], *tape.events[segments[-1].stop :]) for t in _inputs(e)
    }
    outside |= set(tape.outputs)
    if any(owner.get(t, last) != last for t in outside):
        return False
    return _same_sources(segments)


def _same_sources(segments: list[_Segment]) -> bool:
    """Whether layers of a kind, after layers of a kind, read the same of the previous one's tensors."""
    known: dict[tuple[int, int], list[int]] = {}
    for before, segment in itertools.pairwise(segments):
        places = {t: i for i, t in enumerate(before.made)}
        read = [places.get(t, -1) for t in segment.outside]
        if known.setdefault((before.kind, segment.kind), read) != read:
            return False
    return True


def _inputs(event: Event) -> tuple[int, ...]:
    return (event.source,) if isinstance(event, Mark) else event.inputs


def _kept(segments: list[_Segment]) -> list[int]:
    """Indices of the layers that stay: every transition between kinds once."""
    kinds = [s.kind for s in segments]
    seen: set[tuple[int, int]] = set()
    kept = [0]
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
            kept.append(following)
        current = following
    return kept


def _shortened(tape: Tape, segments: list[_Segment], kept: list[int]) -> Tape:
    """The tape without the dropped layers; what read their results reads the kept layer's before them."""
    rename: dict[int, int] = {}
    dropped: set[int] = set()
    for index, following in zip(kept, [*kept[1:], len(segments)], strict=True):
        replaced = segments[following - 1]
        if following - 1 != index:
            rename.update(zip(replaced.made, segments[index].made, strict=True))
        for gone in segments[index + 1 : following]:
            dropped.update(range(gone.start, gone.stop))
    gone_names = tuple(s.fqn + "." for i, s in enumerate(segments) if i not in set(kept))
    gone_fqns = {s.fqn for i, s in enumerate(segments) if i not in set(kept)}
    events = [_renamed(e, rename) for p, e in enumerate(tape.events) if p not in dropped]
    replays = [
        _renamed_replay(r, rename)
        for r in tape.replays
        if r.fqn not in gone_fqns and not r.fqn.startswith(gone_names)
    ]
    outputs = tuple(rename.get(t, t) for t in tape.outputs)
    return replace(tape, events=events, replays=replays, outputs=outputs)


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


def _renamed_replay(replay: Replay, rename: Mapping[int, int]) -> Replay:
    return replace(
        replay,
        args=_renamed_value(replay.args, rename),
        kwargs={k: _renamed_value(v, rename) for k, v in replay.kwargs.items()},
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


def _ties(segments: list[_Segment], kept: list[int]) -> tuple[tuple[int, int], ...]:
    first: dict[int, _Segment] = {}
    ties: list[tuple[int, int]] = []
    for index in kept:
        segment = segments[index]
        known = first.setdefault(segment.kind, segment)
        if known is not segment:
            ties += [(a, b) for a, b in zip(known.made, segment.made, strict=True)]
            ties += [(a, b) for a, b in zip(known.outside, segment.outside, strict=True) if a != b]
    return tuple(ties)


def _instances(segments: list[_Segment], kept: list[int]) -> dict[str, tuple[str, ...]]:
    first: dict[int, str] = {}
    out: dict[str, list[str]] = {}
    for index in kept:
        first.setdefault(segments[index].kind, segments[index].fqn)
        out[segments[index].fqn] = [segments[index].fqn]
    for index, segment in enumerate(segments):
        if index not in kept:
            out[first[segment.kind]].append(segment.fqn)
    return {layer: tuple(names) for layer, names in out.items()}


def _weights(segments: list[_Segment], kept: list[int]) -> dict[str, float]:
    total: dict[int, int] = {}
    stay: dict[int, int] = {}
    for index, segment in enumerate(segments):
        total[segment.kind] = total.get(segment.kind, 0) + 1
        stay[segment.kind] = stay.get(segment.kind, 0) + (index in kept)
    return {segments[i].fqn: total[segments[i].kind] / stay[segments[i].kind] for i in kept}
