"""How the stages of a pipeline hand tensors on: a rank talks to the ranks of equal place on other stages.

All stages run the same code, so that each tensor is sent and received at the same point of it. Modules know
only the link: the place of their rank, and whose pass is running. The link has a transport, which brings
tensors to other stages. A caller can hand it another one for some calls, as a schedule of microbatches does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..errors import RefusedCallError

Crossing = tuple[str, int]
"""A value that other stages need: the FQN of the module that returns it, and its place among its results."""


class Transport(ABC):
    """A way to get tensors from one stage to another."""

    only_measures: ClassVar[bool] = False
    """Whether passes compute nothing, and only find the forms of all values, their own stage's included."""
    may_miss_values: ClassVar[bool] = False
    """Whether a call may leave out modules whose results other stages need in every call."""

    @abstractmethod
    def send(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        """Send a value, local of any shape, to later stages."""

    @abstractmethod
    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return the value, of this (local) shape, that an earlier stage sends next."""

    @abstractmethod
    def share(self, tensors: Sequence[Tensor]) -> None:
        """Copy the last stage's tensors to all stages, in place; (local) shapes are equal on all stages."""


class Handover(Transport):
    """One pass of a stage in a schedule, which sends and receives in place of the pass.

    Args:
        received: the values that earlier stages have sent, local.
    """

    def __init__(self, received: Mapping[Crossing, Tensor]) -> None:
        self.values = dict(received)
        """Values that were received, and that the pass leaves for later stages."""

    def send(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        """Leave a value for the schedule."""
        if crossing in self.values:
            raise RefusedCallError(
                f"{crossing[0]} is called more than once, and another stage needs its results: such a model "
                "cannot be trained in stages; convert it without --pp"
            )
        self.values[crossing] = x

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return a value that the schedule has received."""
        value = self.values.get(crossing)
        if value is None or tuple(value.shape) != tuple(shape) or value.dtype != dtype:
            raise RefusedCallError(
                f"{crossing[0]}, of another stage, is called otherwise than in the first microbatch; give "
                "all microbatches the same arguments, in the same shapes"
            )
        return value

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Leave them as they are: only the last stage of a schedule has results."""


class StageLink:
    """The place of one rank in a pipeline, and its connection to the other stages."""

    def __init__(self, place: int, count: int, transport: Transport, num_places: int | None = None) -> None:
        self.place = place
        self.count = count
        self.num_places = count if num_places is None else num_places
        self.stages = tuple(range(place, count, self.num_places))
        """The stages of this rank."""
        self._stage = self.stages[-1]
        self._transport = transport
        self._shares_results = True
        self._num_calls = 0
        self._handed_on: set[Crossing] = set()
        """Values that this rank sent or received in the running call of the model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this link: a copy of a model talks to the same stages."""
        return self

    # The pass that is running

    @property
    def stage(self) -> int:
        """Return the stage of this rank whose pass is running, or its last one between passes."""
        return self._stage

    @property
    def transport(self) -> Transport:
        """Return the transport of the running pass."""
        return self._transport

    @property
    def is_last(self) -> bool:
        """Return whether the model's results are computed here."""
        return self._stage == self.count - 1

    def is_scheduled(self) -> bool:
        """Return whether a schedule sends and receives in place of the running pass."""
        return isinstance(self._transport, Handover)

    @property
    def is_measuring(self) -> bool:
        """Return whether the running pass only finds the forms of received values, and computes nothing."""
        return self._transport.only_measures

    @contextmanager
    def through(self, transport: Transport, stage: int | None = None) -> Iterator[None]:
        """Run passes with another transport."""
        before = self._transport, self._stage
        self._transport = transport
        self._stage = self._stage if stage is None else stage
        try:
            yield
        finally:
            self._transport, self._stage = before

    # Calls in which all stages take part

    def begin_call(self) -> None:
        """Note that a call begins in which all stages take part: of the model, or of ``generate``."""
        self._num_calls += 1
        self._handed_on.clear()

    def end_call(self) -> None:
        """Note that a call has ended, or failed, perhaps before it began."""
        self._num_calls = max(0, self._num_calls - 1)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Take part in a call with all other stages."""
        before = self._num_calls
        self.begin_call()
        try:
            yield
        finally:
            self._num_calls = before

    @property
    def is_called(self) -> bool:
        """Return whether a call is running in which all stages take part."""
        return self._num_calls > 0

    # Values that cross

    def send(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        """Give a result of a module, local of any shape, to later stages."""
        self._handed_on.add(crossing)
        self._transport.send(crossing, x, stages)

    def needs(self, stages: Sequence[int]) -> bool:
        """Return whether the running pass needs a result that goes to these stages."""
        return self._stage in stages or self.is_measuring

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return the result, of this (local) shape, that an earlier stage sends next."""
        self._handed_on.add(crossing)
        return self._transport.receive(crossing, shape, dtype, source)

    def missing(self, expected: Set[Crossing]) -> Set[Crossing]:
        """Return the values that should cross in each call, and did not in this one."""
        return frozenset() if self._transport.may_miss_values else expected - self._handed_on

    # Results, which the last stage computes

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Copy the last stage's tensors to all stages, in place; (local) shapes are equal on all stages."""
        self._transport.share(tensors)

    def share_results(self, results: Sequence[Tensor]) -> None:
        """Give the results of a call of the model to all stages, but see ``keeping_results``."""
        if self._shares_results:
            self._transport.share(results)

    @contextmanager
    def keeping_results(self) -> Iterator[None]:
        """Leave the results of the model's calls on the last stage: its caller shares something smaller."""
        before, self._shares_results = self._shares_results, False
        try:
            yield
        finally:
            self._shares_results = before
