"""Split the tape into units, between which it can be cut into stages.

A **unit** is an outermost module call that contains no border. Borders are behind the layers of the outermost
stacks. A unit runs on one stage, and the other stages have a placeholder for it. Code between units (the
model's own code, and modules without parameters) runs on every stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardconv_runtime.errors import SolveError

from ..tracing.fold import NUMBERED
from ..tracing.tape import Event, Mark, Op, Tape, depending_on, prefixes, reads_and_writes


@dataclass(frozen=True)
class Unit:
    """A module that runs on one stage, or on several if it is called in several."""

    fqn: str
    calls: tuple[int, ...]
    """Indices into ``Tape.calls``."""
    starts: tuple[int, ...]
    """Positions of the first events of the calls."""
    parameters: frozenset[str]
    """Names of the parameters and persistent buffers in it, each under the first of its names."""


@dataclass(frozen=True)
class CutPoint:
    """A place where the tape may be cut."""

    position: int
    """Position of the first event behind it."""
    layer: str
    """FQN of the layer in front of it."""


class TapeUnits:
    """Units and borders of a tape."""

    def __init__(
        self, tape: Tape, names: Mapping[str, str], everywhere: Collection[str] = frozenset()
    ) -> None:
        self.tape = tape
        self.names = names
        self._everywhere = everywhere
        self._spans = _spans(tape)
        self._children: dict[int, list[int]] = {}
        for index, call in enumerate(tape.calls):
            self._children.setdefault(call.parent, []).append(index)

    @cached_property
    def layers(self) -> Sequence[int]:
        """Return the calls of layers of outermost stacks, in the order in which they run."""
        stacks: dict[tuple[int, str], list[int]] = {}
        for index, call in enumerate(self.tape.calls):
            match = NUMBERED.fullmatch(call.fqn)
            if match and index in self._spans:
                stacks.setdefault((call.parent, match[1]), []).append(index)
        layers: set[int] = set()
        for calls in stacks.values():
            if len(calls) > 1 and not any(c in layers for c in self._around(calls[0])):
                layers.update(calls)
        return sorted(layers, key=lambda call: self._spans[call][1])

    @cached_property
    def borders(self) -> Sequence[CutPoint]:
        """Return the border behind each layer."""
        return [CutPoint(self._spans[call][1] + 1, self.tape.calls[call].fqn) for call in self.layers]

    @cached_property
    def units(self) -> Mapping[str, Unit]:
        """Return the units with parameters by FQN, in the order of their first calls."""
        calls: dict[str, list[int]] = {}
        for call in self._outermost(-1):
            fqn = self.tape.calls[call].fqn
            if self._held(fqn) and fqn not in self._everywhere:
                calls.setdefault(fqn, []).append(call)
        return {
            fqn: Unit(fqn, tuple(unit_calls), tuple(self._spans[c][0] for c in unit_calls), self._held(fqn))
            for fqn, unit_calls in calls.items()
        }

    @cached_property
    def unit_of(self) -> Mapping[int, tuple[str, int]]:
        """Map the index of a call to the unit that it is in, and to the call of that unit."""
        of_units = {call: unit.fqn for unit in self.units.values() for call in unit.calls}
        units: dict[int, tuple[str, int]] = {}
        for index, call in enumerate(self.tape.calls):
            if index in of_units:
                units[index] = of_units[index], index
            elif call.parent in units:
                units[index] = units[call.parent]
        return units

    def _outermost(self, parent: int) -> Iterator[int]:
        """Yield the outermost calls that contain no border."""
        for call in self._children.get(parent, ()):
            if call not in self._spans:
                continue
            first, last = self._spans[call]
            if any(first < border.position <= last for border in self.borders):
                yield from self._outermost(call)
            else:
                yield call

    def _held(self, fqn: str) -> frozenset[str]:
        return self._parameters.get(fqn, frozenset())

    @cached_property
    def _parameters(self) -> Mapping[str, frozenset[str]]:
        by_unit: dict[str, set[str]] = {}
        for name, first in self.names.items():
            for module in prefixes(name.rpartition(".")[0]):
                by_unit.setdefault(module, set()).add(first)
        return {fqn: frozenset(names) for fqn, names in by_unit.items()}

    def _around(self, call: int) -> Iterator[int]:
        while call >= 0:
            yield call
            call = self.tape.calls[call].parent


def _spans(tape: Tape) -> dict[int, tuple[int, int]]:
    """Map calls to the positions of the first and last event in them, without calls that have no events."""
    spans: dict[int, tuple[int, int]] = {}
    for position, event in enumerate(tape.events):
        call = event.call
        while call >= 0:
            first, _ = spans.get(call, (position, position))
            spans[call] = first, position
            call = tape.calls[call].parent
    return spans


# Stages receive results of units of earlier stages that they cannot compute again from the inputs.
#
# The tape is walked back from everything that a stage reads. The walk ends at inputs and constants, which
# every stage has, and at results of units, which are sent. The model's own code computes everything between
# again: masks, rotary tables, positions, sums of results.

MOST_VALUES = 8
"""Most tensors that a stage may receive. The model is not cut at places that need more."""


class Uncut(SolveError):
    """The tape cannot be cut there."""


@dataclass(frozen=True, order=True)
class Value:
    """A result of a unit that another stage needs."""

    tid: int
    unit: str
    """FQN."""
    call: int
    port: str


class Crossings:
    """The values that cross cuts of one tape."""

    def __init__(self, units: TapeUnits) -> None:
        self.units = units
        self.tape = units.tape
        self._stored = {t for t, i in enumerate(self.tape.tensors) if i.kind in ("parameter", "buffer")}
        self._producer: dict[int, int] = {}
        for position, event in enumerate(self.tape.events):
            self._producer.update(dict.fromkeys(reads_and_writes(event)[1], position))
        self._results: dict[int, Value] = {}
        for event in self.tape.events:
            if isinstance(event, Mark) and event.is_output and event.call in units.unit_of:
                fqn, call = units.unit_of[event.call]
                if call == event.call:
                    self._results[event.target] = Value(event.target, fqn, call, event.ports[0])

    def needed(self, start: int, stop: int) -> list[Value]:
        """Return the values that a stage needs from earlier ones, in the order in which they are computed."""
        pending: list[int] = []
        for event in self.tape.events[start:stop]:
            pending += self._read_by(event, start, stop)
        if stop >= len(self.tape.events):
            pending += self.tape.outputs
        seen: set[int] = set()
        values: dict[int, Value] = {}
        while pending:
            tid = pending.pop()
            position = self._producer.get(tid)
            if tid in seen or position is None or position >= start:
                continue
            seen.add(tid)
            if tid in self._results:
                values[tid] = self._results[tid]
                continue
            event = self.tape.events[position]
            if event.call in self.units.unit_of:
                fqn, unit = self.tape.calls[event.call].fqn, self.units.unit_of[event.call][0]
                raise Uncut(
                    f"a later stage reads a tensor {list(self.tape.tensors[tid].shape)} that {fqn} computes "
                    f"inside of {unit}, and does not return"
                )
            pending += self._read_by(event, start, stop)
        return sorted(values.values())

    def _read_by(self, event: Event, start: int, stop: int) -> tuple[int, ...]:
        """Return the tensors that an event reads."""
        inputs = reads_and_writes(event)[0]
        for name in (self.tape.tensors[t].name for t in inputs if t in self._stored):
            holders = [u for u in self.units.units.values() if name in u.parameters]
            unit = self.units.unit_of.get(event.call, ("", -1))[0]
            here = any(u.fqn == unit or any(start <= s < stop for s in u.starts) for u in holders)
            if holders and not here:
                where = self.tape.calls[event.call].fqn or "the model's own code"
                raise Uncut(
                    f"{where} reads the parameter {name} of {holders[0].fqn}, which is on another stage"
                )
        return inputs

    def conflict(self, position: int) -> str:
        """Say why the tape cannot be cut at a position; empty if it can."""
        try:
            values = self.needed(position, len(self.tape.events))
        except Uncut as error:
            return str(error)
        if not any(value.call in self.units.layers for value in values):
            return "nothing that a layer in front of it computes is needed behind it"
        if len(values) > MOST_VALUES:
            return f"{len(values)} tensors would cross, e.g. {values[0].port} of {values[0].unit}"
        return ""

    def unanswerable(self) -> str:
        """Say where code between units asks for a value that depends on parameters; empty if it never does.

        Stages on which the unit is a placeholder would get another answer.
        """
        weighted = depending_on(self.tape, self._stored)
        for event in (event for event in self.tape.events if event.call not in self.units.unit_of):
            if isinstance(event, Op) and event.name == "question" and event.inputs[0] in weighted:
                where = self.tape.calls[event.call].fqn or "the model's own code"
                return f"{where} asks for values that depend on parameters"
        return ""
