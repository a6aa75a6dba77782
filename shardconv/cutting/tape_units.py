"""The tape as a row of units, between which it can be cut into stages.

A **unit** is an outermost module call that contains no border; borders lie behind the layers of the outermost
stacks. A unit runs on one stage, and the other stages have a stand-in in its place. What runs between units
(the model's own code, and modules without parameters) runs on every stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..tracing.fold import NUMBERED
from ..tracing.tape import Tape, prefixes


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
    """Of the first event behind it."""
    layer: str
    """FQN of the layer in front of it."""


class TapeUnits:
    """Units and borders of a tape.

    Args:
        tape: of one forward pass, not folded.
        names: each name of a parameter or persistent buffer -> the first name of that tensor.
        everywhere: modules with parameters that run on every stage, and are no units.
    """

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
        """Calls of the layers of outermost stacks, in the order in which they run."""
        stacks: dict[tuple[int, str], list[int]] = {}
        for index, call in enumerate(self.tape.calls):
            match = NUMBERED.fullmatch(call.fqn)
            if match and index in self._spans:
                stacks.setdefault((call.parent, match[1]), []).append(index)
        found: set[int] = set()
        for calls in stacks.values():
            if len(calls) > 1 and not any(c in found for c in self._around(calls[0])):
                found.update(calls)
        return sorted(found, key=lambda call: self._spans[call][1])

    @cached_property
    def borders(self) -> Sequence[CutPoint]:
        """Behind each layer."""
        return [CutPoint(self._spans[call][1] + 1, self.tape.calls[call].fqn) for call in self.layers]

    @cached_property
    def units(self) -> Mapping[str, Unit]:
        """The units with parameters by FQN, in the order of their first calls."""
        calls: dict[str, list[int]] = {}
        for call in self._outermost(-1):
            fqn = self.tape.calls[call].fqn
            if self._held(fqn) and fqn not in self._everywhere:
                calls.setdefault(fqn, []).append(call)
        return {
            fqn: Unit(fqn, tuple(found), tuple(self._spans[c][0] for c in found), self._held(fqn))
            for fqn, found in calls.items()
        }

    @cached_property
    def unit_of(self) -> Mapping[int, tuple[str, int]]:
        """Index of a call -> the unit that it is in, and the call of that unit."""
        own = {call: unit.fqn for unit in self.units.values() for call in unit.calls}
        found: dict[int, tuple[str, int]] = {}
        for index, call in enumerate(self.tape.calls):
            if index in own:
                found[index] = own[index], index
            elif call.parent in found:
                found[index] = found[call.parent]
        return found

    def _outermost(self, parent: int) -> Iterator[int]:
        """Calls that contain no border, but are in one that does."""
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
        found: dict[str, set[str]] = {}
        for name, first in self.names.items():
            for module in prefixes(name.rpartition(".")[0]):
                found.setdefault(module, set()).add(first)
        return {fqn: frozenset(names) for fqn, names in found.items()}

    def _around(self, call: int) -> Iterator[int]:
        while call >= 0:
            yield call
            call = self.tape.calls[call].parent


def _spans(tape: Tape) -> dict[int, tuple[int, int]]:
    """Call -> positions of the first and the last event in it; calls without events are left out."""
    found: dict[int, tuple[int, int]] = {}
    for position, event in enumerate(tape.events):
        call = event.call
        while call >= 0:
            first, _ = found.get(call, (position, position))
            found[call] = first, position
            call = tape.calls[call].parent
    return found
