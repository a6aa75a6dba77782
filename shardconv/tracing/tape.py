"""The tape of one forward pass: operators, the tensors that they read and write, and marks.

Tensors are values, so an in-place operator makes a new one. A **mark** is an identity at a module's input or
output, the only place where the runtime can insert a collective.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

ALIAS_WRITE = "alias_write"
"""The operator that gives a tensor the value that was written to its memory through another tensor."""


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
    """Index into ``Tape.calls`` of the module call around it."""
    overload: Any = None
    origin: str = ""
    """Name of the Python module whose code called it."""

    @property
    def base(self) -> str:
        """Return the name without the overload: ``aten.add`` of ``aten.add.Tensor``."""
        return _without_overload(self.name)

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers, or may with other arguments, as dropout does."""
        return self.overload is not None and torch.Tag.nondeterministic_seeded in self.overload.tags


@cache
def _without_overload(name: str) -> str:
    return name.rpartition(".")[0] or name


@dataclass(frozen=True, slots=True)
class Mark:
    """An identity at a port of a module call."""

    call: int
    ports: tuple[str, ...]
    """``input.hidden_states``, ``output.0`` …; several if one tensor is passed more than once."""
    source: int
    target: int

    @property
    def is_output(self) -> bool:
        """Whether the tensor leaves the module."""
        return self.ports[0].startswith("output")


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module; ``index`` counts the calls of this module."""

    fqn: str
    index: int
    parent: int


@dataclass(frozen=True, slots=True)
class ReturnedItem:
    """An item of the result of a module call."""

    is_tensor: bool = False
    argument: str = ""
    """Name of the argument that it is, if it is not a tensor: a cache that is passed through."""
    is_other: bool = False
    """Whether it is neither a tensor, nor None, nor an argument."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The form of the result of a module call. Its tensors have marks."""

    kind: str
    """``tensor`` (one item), ``tuple`` or ``list`` (these items), or ``other``."""
    items: tuple[ReturnedItem, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """A call of a cache's method that writes to it."""

    call: int
    """Index of the module call whose code called the method."""
    method: str
    args: tuple[Any, ...]
    """Tensors are ``Ref``."""
    kwargs: dict[str, Any]
    givers: dict[int, tuple[str, str]]
    """Index of a module call that got this cache -> (argument, attribute of the argument that is the cache;
    empty if the argument is the cache itself)."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedIntCall:
    """A torch function with traced ints among its arguments. Overrides must keep its result right."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    fqn: str


Event = Op | Mark


def last_calls(tape: Tape) -> list[int]:
    """Map each call to the last call in it."""
    last = list(range(len(tape.calls)))
    for index in range(len(tape.calls) - 1, -1, -1):
        parent = tape.calls[index].parent
        if parent >= 0:
            last[parent] = max(last[parent], last[index])
    return last


def reads_and_writes(event: Event) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tensors that an event reads, and the tensors that it makes."""
    if isinstance(event, Mark):
        return (event.source,), (event.target,)
    return event.inputs, event.outputs


def makers(tape: Tape) -> dict[int, Event]:
    """Map each tensor to the event that made it."""
    return {tid: event for event in tape.events for tid in reads_and_writes(event)[1]}


def tensors_read(tape: Tape) -> set[int]:
    """Return the tensors that any event reads."""
    return {tid for event in tape.events for tid in reads_and_writes(event)[0]}


def depending_on(tape: Tape, tids: Iterable[int]) -> set[int]:
    """Return these tensors and all that are computed from any of them."""
    dependents = set(tids)
    for event in tape.events:
        inputs, outputs = reads_and_writes(event)
        if not dependents.isdisjoint(inputs):
            dependents.update(outputs)
    return dependents


def starred(fqn: str) -> str:
    """Replace every number in ``fqn`` by a star, so that the layers of a stack have the same name."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", fqn)


def prefixes(fqn: str) -> Iterator[str]:
    """Yield a name and the modules that contain it, innermost first."""
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
    """Both sides, as ``ints.Expr``, of each comparison of ints."""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    handed_back: tuple[int, ...] = ()
    """Outputs that are named like an argument. A caller passes them to the next call, on the same rank."""
    guesses: list[str] = field(default_factory=list)
    """Questions that were answered by a guess, for the notes of the plan."""
    answers: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    """(FQN, index) of a module call -> its guesses, in order."""
    result_tuples: dict[int, tuple[type[tuple[Any, ...]], int]] = field(default_factory=dict)
    """Index of a module call -> the type of the tuple that it returned, and its number of items."""
    returned: dict[int, Returned] = field(default_factory=dict)
    """Index of a module call -> the form of its result."""
    cache_updates: list[CacheUpdate] = field(default_factory=list)
    given_caches: set[int] = field(default_factory=set)
    """Indices of the module calls that got a cache."""
    opaque: dict[tuple[str, int], str] = field(default_factory=dict)
    """(FQN, index) of a module call that could not be traced -> the reason."""
    not_in_training: frozenset[str] = frozenset()
    """Modules that are not called in training, since other code reads their parameters."""
    inner_sources: frozenset[str] = frozenset()
    """Names of the Python modules that called the operators that an opaque operator replaced."""

    def training_call(self, call: int) -> int:
        """Return the innermost call around (or equal to) a call that is also made in training."""
        while self.calls[call].fqn in self.not_in_training:
            call = self.calls[call].parent
        return call

    def sources(self) -> frozenset[str]:
        """Return names of the Python modules whose code called torch."""
        called = frozenset(e.origin for e in self.events if isinstance(e, Op) and e.origin)
        return called | self.inner_sources


def draws(tape: Tape) -> list[Op]:
    """Return the operators that draw random numbers in inference, where dropout does not."""
    of_training = {"train", "training", "dropout_p"}
    ops = (event for event in tape.events if isinstance(event, Op) and event.is_random)
    return [op for op in ops if of_training.isdisjoint(a.name for a in op.overload._schema.arguments)]
