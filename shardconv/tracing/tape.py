"""One forward pass as a tape: operators, the tensors they read and write, and marks.

Tensors are values: an in-place operator makes a new one. A **mark** is an identity at a module's input or
output: only there can the runtime put a collective.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

ALIAS_WRITE = "alias_write"
"""The operator that gives a tensor the value that was written to its memory through another."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the tape, in an operator's arguments."""

    tid: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A value of the traced computation."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    """``value``, ``parameter``, ``buffer`` (persistent), ``input`` or ``constant``."""
    name: str = ""
    """FQN of a parameter or buffer, name of an input."""


@dataclass(slots=True, eq=False)
class Op:
    """An operator with the tensors that it reads (``Ref`` in ``args``/``kwargs``) and writes."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: int
    """Index into ``Tape.calls`` of the module call that it ran in."""
    overload: Any = None
    origin: str = ""
    """Name of the Python module whose code called it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An identity at a slot of a module call."""

    call: int
    slots: tuple[str, ...]
    """``input.hidden_states``, ``output.0`` …; several if one tensor is passed more than once."""
    source: int
    target: int

    @property
    def is_output(self) -> bool:
        """Whether the tensor leaves the module."""
        return self.slots[0].startswith("output")


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module; ``index`` counts the calls of that module."""

    fqn: str
    index: int
    parent: int


@dataclass(frozen=True, slots=True)
class ReturnedItem:
    """An item of what a module call returned."""

    is_tensor: bool = False
    argument: str = ""
    """Name of the argument that it is, where it is no tensor: a cache that is handed through."""
    is_other: bool = False
    """Neither a tensor, nor None, nor an argument."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The form of what a module call returned; its tensors have marks."""

    kind: str
    """``tensor``: one item; ``tuple``, ``list``: these items; ``other``."""
    items: tuple[ReturnedItem, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """A call of a method of a cache that writes to it."""

    call: int
    """Index of the module call whose code made it."""
    method: str
    args: tuple[Any, ...]
    """Tensors are ``Ref``."""
    kwargs: dict[str, Any]
    givers: dict[int, tuple[str, str]]
    """Index of a module call that was given this cache -> (its argument, attribute of that which is the
    cache; empty if the argument is the cache itself)."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedIntCall:
    """A torch function that was given traced ints: attribute edits must keep its result right."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    fqn: str


Event = Op | Mark


def last_calls(tape: Tape) -> list[int]:
    """For each call, the last call in it."""
    last = list(range(len(tape.calls)))
    for index in range(len(tape.calls) - 1, -1, -1):
        parent = tape.calls[index].parent
        if parent >= 0:
            last[parent] = max(last[parent], last[index])
    return last


def reads_and_writes(event: Event) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tensors that an event reads, and those that it makes."""
    if isinstance(event, Mark):
        return (event.source,), (event.target,)
    return event.inputs, event.outputs


def makers(tape: Tape) -> dict[int, Event]:
    """Tensor -> the event that made it."""
    return {tid: event for event in tape.events for tid in reads_and_writes(event)[1]}


def tensors_read(tape: Tape) -> set[int]:
    """The tensors that any event reads."""
    return {tid for event in tape.events for tid in reads_and_writes(event)[0]}


def starred(fqn: str) -> str:
    """``fqn`` with a star for every number, so that the layers of a stack are named alike."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", fqn)


def prefixes(fqn: str) -> Iterator[str]:
    """A name and the modules that contain it, innermost first."""
    while fqn:
        yield fqn
        fqn = fqn.rpartition(".")[0]


@dataclass(slots=True)
class Tape:
    """One forward pass: its operators and marks, in order."""

    tensors: list[TensorInfo] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    replays: list[TracedIntCall] = field(default_factory=list)
    comparisons: list[tuple[Any, Any]] = field(default_factory=list)
    """Both sides, as ``ints.Expr``, wherever code asked which of two ints is larger."""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    handed_back: tuple[int, ...] = ()
    """Outputs under the name of an argument: a caller gives them to the next call, on the same rank."""
    guesses: list[str] = field(default_factory=list)
    """Questions that were answered by a guess, for the plan's notes."""
    answers: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    """(FQN, index) of a module call -> the guesses that it was given, in order."""
    result_tuples: dict[int, tuple[type[tuple[Any, ...]], int]] = field(default_factory=dict)
    """Index of a module call -> the type of the tuple that it returned, and its number of items."""
    returned: dict[int, Returned] = field(default_factory=dict)
    """Index of a module call -> the form of what it returned."""
    cache_updates: list[CacheUpdate] = field(default_factory=list)
    given_caches: set[int] = field(default_factory=set)
    """Indices of the module calls that were given a cache."""
    opaque: dict[tuple[str, int], str] = field(default_factory=dict)
    """(FQN, index) of a module call that could not be traced -> why."""
    not_in_training: frozenset[str] = frozenset()
    """Modules whose parameters other code reads in training, instead of calling them."""
    inner_sources: frozenset[str] = frozenset()
    """Of operators that replaced several others: names of the Python modules that called those."""

    def training_call(self, call: int) -> int:
        """The innermost call around code, or itself, that is made in training too."""
        while self.calls[call].fqn in self.not_in_training:
            call = self.calls[call].parent
        return call

    def sources(self) -> frozenset[str]:
        """Names of the Python modules whose code called torch."""
        called = frozenset(e.origin for e in self.events if isinstance(e, Op) and e.origin)
        return called | self.inner_sources


def draws(tape: Tape) -> list[Op]:
    """The operators that draw random numbers; dropout does not, in inference."""
    return [e for e in tape.events if isinstance(e, Op) and e.overload is not None and _is_random(e.overload)]


def _is_random(overload: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    return not {"train", "training", "dropout_p"} & {a.name for a in overload._schema.arguments}
