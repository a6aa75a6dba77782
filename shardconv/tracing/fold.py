"""Layers repeat: the tape with each kind of layer once or twice, and who stands for whom.

The calls of numbered siblings (``layers.0``, ``layers.1`` …) are compared by everything that they do:
operators, arguments, shapes, traced ints, and where their operands come from. Layers that do the same
are of one kind; class names and attributes are not trusted. Of a run of layers, those stay that show a
new transition from one kind to the next. A dropped run is replaced by the layer before it, which is of
the kind of the last one dropped.

All layers of a kind must get the same answer, so the copies that stay are tied, tensor by tensor. What the
model returns of each layer, such as the scores of its router, is read of the first layer of the kind.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .ints import TracedInt
from .layer_kinds import Segment, classify, made_alike, segments_of
from .tape import Event, Mark, Ref, Tape, TracedIntCall, prefixes

NUMBERED = re.compile(r"(.*)\.(\d+)")
"""The FQN of a layer of a stack: that of the stack, and its number."""


@dataclass(frozen=True)
class Folded:
    """A shorter tape, and how to read its answer for the complete model."""

    tape: Tape
    ties: tuple[tuple[int, int], ...] = ()
    """Pairs of tensors that must be treated alike."""
    same: tuple[tuple[int, int], ...] = ()
    """Pairs of a state of a layer that stays and of one that was dropped, which are laid out as one."""
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


def fold(tape: Tape, first_apart: bool = False) -> Folded:
    """Fold every stack of numbered layers whose layers read the tensors of the layer before them alone.

    Of stacks in the layers of a stack, the outermost one that can be folded is.

    Args:
        tape: of the model.
        first_apart: the first layer of a stack is of a kind of its own, so that its inputs may be laid
            out in another way than the inputs of the others.
    """
    result = Folded(tape)
    members: set[int] = set()
    for calls in _stacks(tape):
        if _is_inside(tape, calls[0], members):
            continue
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


# Finding stacks ------------------------------------------------------------------------------------


def _stacks(tape: Tape) -> list[list[int]]:
    """Calls of numbered siblings, three or more; outer stacks before those in their layers."""
    groups: dict[tuple[int, str], list[int]] = {}
    for index, call in enumerate(tape.calls):
        match = NUMBERED.fullmatch(call.fqn)
        if match and call.index == 0:
            groups.setdefault((call.parent, match[1]), []).append(index)
    return [calls for calls in groups.values() if len(calls) > 2]


def _is_inside(tape: Tape, call: int, members: set[int]) -> bool:
    """Whether a call is one of these, or in one."""
    while call >= 0:
        if call in members:
            return True
        call = tape.calls[call].parent
    return False


# Folding a stack -----------------------------------------------------------------------------------

_Pairs = tuple[tuple[int, int], ...]
_Result = tuple[Tape, _Pairs, _Pairs, dict[str, tuple[str, ...]], dict[str, float]]


def _fold_stack(tape: Tape, segments: list[Segment], first_apart: bool) -> _Result | None:
    if any(a.stop > b.start for a, b in itertools.pairwise(segments)):
        return None
    is_apart = any(a.stop != b.start for a, b in itertools.pairwise(segments))
    classify(tape, segments)
    if first_apart:
        segments[0].kind = 1 + max(segment.kind for segment in segments)
    if not _only_pass_on(segments) or (is_apart and not _pass_on(segments)):
        return None
    states = made_alike(tape)
    kept = _kept(segments)
    if len(kept) == len(segments):
        return None
    return (
        _shortened(tape, segments, kept, states),
        _ties(segments, kept),
        _same(segments, kept, states),
        _instances(segments, kept),
        _weights(segments, kept),
    )


def _only_pass_on(segments: list[Segment]) -> bool:
    """Whether each layer reads no other layer's tensors than those of the one before it."""
    owner = {t: i for i, s in enumerate(segments) for t in s.made}
    for index, segment in enumerate(segments):
        if any(owner.get(t, index - 1) != index - 1 for t in segment.outside):
            return False
    return _same_sources(segments)


def _pass_on(segments: list[Segment]) -> bool:
    """Whether each layer reads something of the one before it."""
    pairs = itertools.pairwise(segments)
    return all(not set(before.made).isdisjoint(segment.outside) for before, segment in pairs)


def _same_sources(segments: list[Segment]) -> bool:
    """Whether layers of a kind, after layers of a kind, read the same of the previous one's tensors."""
    known: dict[tuple[int, int], list[int]] = {}
    for before, segment in itertools.pairwise(segments):
        positions = {t: i for i, t in enumerate(before.made)}
        read = [positions.get(t, -1) for t in segment.outside]
        if known.setdefault((before.kind, segment.kind), read) != read:
            return False
    return True


def _kept(segments: list[Segment]) -> list[int]:
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


def _shortened(tape: Tape, segments: list[Segment], kept: list[int], states: Collection[int]) -> Tape:
    """The tape without the dropped layers; those of the kept layer before replace their results.

    Results that only the code behind the stack or between its layers reads are those of the first layer of
    their kind. States of dropped layers, which other code makes, are those of that layer as well: how their
    sizes are computed need not be localized.
    """
    rename = _first_of_kind(segments, kept)
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
    dropped_segments, kept_segments = (
        [s for i, s in enumerate(segments) if (i in set(kept)) == k] for k in (False, True)
    )
    shared = {t for s in kept_segments for t in s.outside}
    own_states = {t for s in dropped_segments for t in s.outside if t in states and t not in shared}
    replays = [
        _renamed_replay(r, rename)
        for r in tape.replays
        if r.fqn not in gone_fqns and not r.fqn.startswith(gone_names) and own_states.isdisjoint(r.outputs)
    ]
    outputs, handed_back = (
        tuple(rename.get(t, t) for t in tids) for tids in (tape.outputs, tape.handed_back)
    )
    return replace(tape, events=events, replays=replays, outputs=outputs, handed_back=handed_back)


def _first_of_kind(segments: list[Segment], kept: list[int]) -> dict[int, int]:
    """Tensor of a dropped layer -> that of the first layer of its kind."""
    first: dict[int, Segment] = {}
    for index in kept:
        first.setdefault(segments[index].kind, segments[index])
    gone = (s for i, s in enumerate(segments) if i not in set(kept))
    return {t: r for s in gone for t, r in zip(s.made, first[s.kind].made, strict=True)}


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


def _renamed_replay(replay: TracedIntCall, rename: Mapping[int, int]) -> TracedIntCall:
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


def _ties(segments: list[Segment], kept: list[int]) -> tuple[tuple[int, int], ...]:
    first: dict[int, Segment] = {}
    ties: list[tuple[int, int]] = []
    for index in kept:
        segment = segments[index]
        known = first.setdefault(segment.kind, segment)
        if known is not segment:
            ties += [(a, b) for a, b in zip(known.made, segment.made, strict=True)]
            ties += [(a, b) for a, b in zip(known.outside, segment.outside, strict=True) if a != b]
    return tuple(ties)


def _same(segments: list[Segment], kept: list[int], states: Collection[int]) -> tuple[tuple[int, int], ...]:
    """For each state that other code made for a dropped layer, that of the first layer of its kind."""
    first: dict[int, Segment] = {}
    for index in kept:
        first.setdefault(segments[index].kind, segments[index])
    gone = (s for i, s in enumerate(segments) if i not in set(kept))
    pairs = (pair for s in gone for pair in zip(first[s.kind].outside, s.outside, strict=True))
    return tuple((a, b) for a, b in pairs if a != b and b in states)


def _instances(segments: list[Segment], kept: list[int]) -> dict[str, tuple[str, ...]]:
    first: dict[int, str] = {}
    out: dict[str, list[str]] = {}
    for index in kept:
        first.setdefault(segments[index].kind, segments[index].fqn)
        out[segments[index].fqn] = [segments[index].fqn]
    for index, segment in enumerate(segments):
        if index not in kept:
            out[first[segment.kind]].append(segment.fqn)
    return {layer: tuple(names) for layer, names in out.items()}


def _weights(segments: list[Segment], kept: list[int]) -> dict[str, float]:
    total: dict[int, int] = {}
    stay: dict[int, int] = {}
    for index, segment in enumerate(segments):
        total[segment.kind] = total.get(segment.kind, 0) + 1
        stay[segment.kind] = stay.get(segment.kind, 0) + (index in kept)
    return {segments[i].fqn: total[segments[i].kind] / stay[segments[i].kind] for i in kept}
