"""Run all ranks of a mesh as threads of one process, to prove a plan without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.comm.host_numbers import HostStates, host_states, set_host_states
from shardconv_runtime.format.slices import Mesh
from torch import Tensor

from .available_memory import return_freed_memory

T = TypeVar("T")

BESIDE = -1
"""Number of the thread that runs in addition to the ranks."""


class RanksDisagree(RuntimeError):
    """The ranks do not run the same collectives; real processes would hang."""


class _Stopped(BaseException):
    """This thread was waiting when another one failed. Model code might handle an ``Exception``."""


@dataclass
class _Meeting:
    """One collective of one group: the tensors handed in, and the result once all are there."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    kinds: set[tuple[object, ...]] = field(default_factory=set)
    result: Tensor | None = None


def _random_states() -> tuple[Tensor, HostStates]:
    return torch.get_rng_state(), host_states()


def _set_random_states(states: tuple[Tensor, HostStates]) -> None:
    torch.set_rng_state(states[0])
    set_host_states(states[1])


class _Schedule:
    """Let one thread run at a time, until it waits for others, and combine what ranks hand in.

    The thread that is furthest behind among the ones that can run is next; threads report their positions.
    Each is woken by a condition of its own, when it is to run.

    All start from the caller's random states, like ranks with the same seed. torch, numpy and Python have one
    random state each for all threads, so these are exchanged where one thread hands on to another.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._positions = dict.fromkeys(numbers, 0)
        self._wakes = {number: threading.Condition(self._lock) for number in self._positions}
        self._ready = set(self._positions)
        self._running: int | None = None
        self._meetings: dict[tuple[object, ...], _Meeting] = {}
        self._in_meetings: dict[int, tuple[_Meeting, tuple[int, ...]]] = {}
        """Number of a thread that waits in a meeting -> the meeting and its members."""
        self._gone: set[int] = set()
        self._failed = False
        self._start = _random_states()
        with self._lock:
            self._choose()

    def begin(self, number: int) -> None:
        """Wait for the first turn of a thread."""
        with self._lock:
            self._await_turn(number)
            _set_random_states(self._start)

    def wait(self, number: int, position: int) -> None:
        """Let threads that are further behind run, until they wait for something else."""
        with self._lock:
            self._positions[number] = max(self._positions[number], position)
            self._ready.add(number)
            self._hand_on(number)
            if self._failed:
                raise _Stopped

    def meet(
        self,
        key: tuple[object, ...],
        rank: int,
        members: tuple[int, ...],
        x: Tensor,
        kind: str,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Tensor:
        """Submit ``x``, wait for the other ``members``, and return a copy of the result.

        The last rank of a collective computes for all.
        """
        with self._lock:
            meeting = self._meetings.setdefault(key, _Meeting())
            meeting.tensors[rank] = x
            meeting.kinds.add((kind, tuple(x.shape), x.dtype))
            if len(meeting.tensors) == len(members):
                if len(meeting.kinds) > 1:
                    kinds = ", ".join(sorted(f"{k} of {shape} {dtype}" for k, shape, dtype in meeting.kinds))
                    del meeting.tensors[rank]  # it leaves, and the others must see that it will not meet them
                    raise RanksDisagree(f"ranks {members} meet in different collectives: {kinds}")
                meeting.result = combine([meeting.tensors[member] for member in members])
                del self._meetings[key]
                self._release(members)
                self._ready.add(rank)
                self._hand_on(rank, goes_on=True)
            elif not self._is_lost(meeting, members):
                self._in_meetings[rank] = meeting, members
                self._hand_on(rank)
            if meeting.result is None:
                if self._failed:
                    raise _Stopped
                raise RanksDisagree(
                    f"rank {rank} waits in {kind} for ranks {members}, of which "
                    "one has ended or waits for others"
                )
        return meeting.result.clone()

    def leave(self, number: int, failed: bool) -> None:
        """End this thread's part, so that other threads stop waiting for it."""
        with self._lock:
            self._gone.add(number)
            self._failed |= failed
            self._release([n for n, place in self._in_meetings.items() if self._is_lost(*place)])
            self._choose()

    def _is_lost(self, meeting: _Meeting, members: tuple[int, ...]) -> bool:
        return self._failed or any(m in self._gone and m not in meeting.tensors for m in members)

    def _release(self, numbers: Iterable[int]) -> None:
        """Let threads that wait in meetings run on."""
        self._ready.update(number for number in numbers if self._in_meetings.pop(number, None))

    def _hand_on(self, number: int, goes_on: bool = False) -> None:
        """Wait until it is this thread's turn again; it ``goes_on`` if no other one is further behind."""
        self._choose(number if goes_on else None)
        if self._running != number:
            states = _random_states()
            self._await_turn(number)
            _set_random_states(states)

    def _choose(self, preferred: int | None = None) -> None:
        if not self._ready:  # threads wait for each other, and real processes would for ever
            self._release(sorted(self._in_meetings)[:1])
        order = {number: (self._positions[number], number != preferred, number) for number in self._ready}
        self._running = min(order, key=order.__getitem__, default=None)
        if self._running is not None:
            self._ready.remove(self._running)
            self._wakes[self._running].notify()

    def _await_turn(self, number: int) -> None:
        self._wakes[number].wait_for(lambda: self._running == number)


class Turn:
    """The part of one thread in a run."""

    def __init__(self, number: int, schedule: _Schedule) -> None:
        self.number = number
        """The rank, or ``BESIDE``."""
        self.schedule = schedule

    def wait_for_others(self, position: int) -> None:
        """Report the position of this thread; threads that are further behind run first."""
        self.schedule.wait(self.number, position)


class ThreadCommunicator(Communicator):
    """Communicator of a rank that is a thread. Sums go in rank order, so that all ranks get the same bits.

    It can be used in several runs, so that a model can keep it.
    """

    turn: Turn
    """The turn of this rank in the current run."""

    def begin(self, turn: Turn) -> None:
        """Take part in a run."""
        self.turn = turn
        self._rounds: dict[tuple[int, ...], int] = {}

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return self._meet(x, axes, "all_reduce", lambda parts: torch.stack(parts).sum(0, dtype=x.dtype))

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return self._meet(x, axes, "all_gather", torch.cat)

    def _meet(
        self, x: Tensor, axes: tuple[int, ...], kind: str, combine: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        members = self.group(axes)
        self._rounds[members] = self._rounds.get(members, 0) + 1
        key = (members, self._rounds[members])
        return self.turn.schedule.meet(key, self.rank, members, x, kind, combine)


class MetaCommunicator(Communicator):
    """Communicator of one rank on the meta device. Collectives allocate like real ones, and compute
    nothing."""

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return torch.empty_like(x)

    def _sum_in_place(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x.new_empty((len(self.group(axes)) * x.shape[0], *x.shape[1:]))

    def _reduce_scatter(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x.new_empty((x.shape[0] // len(self.group(axes)), *x.shape[1:]))


def communicators(mesh: Mesh) -> list[ThreadCommunicator]:
    """Return the communicators of the ranks of a mesh."""
    return [ThreadCommunicator(rank, mesh) for rank in range(torch.Size(mesh).numel())]


def run_ranks(
    mesh: Mesh,
    function: Callable[[ThreadCommunicator], T],
    beside: Callable[[Turn], object] | None = None,
    *,
    ranks: Sequence[ThreadCommunicator] = (),
) -> list[T]:
    """Run ``function`` once for each rank of ``mesh``, in turns, and return the results by rank.

    Each thread has the caller's grad and inference mode and random state. ``function`` must not change
    anything that the ranks share, such as a model.
    """
    num_ranks = torch.Size(mesh).numel()
    numbers = range(num_ranks) if beside is None else range(BESIDE, num_ranks)
    schedule = _Schedule(numbers)
    ranks = ranks or communicators(mesh)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(turn: Turn) -> None:
        schedule.begin(turn.number)
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                if turn.number != BESIDE:
                    ranks[turn.number].begin(turn)
                    results[turn.number] = function(ranks[turn.number])
                elif beside is not None:
                    beside(turn)
        except BaseException as error:
            errors[turn.number] = error
        finally:
            schedule.leave(turn.number, failed=turn.number in errors)

    threads = [
        threading.Thread(target=run, args=(Turn(number, schedule),), daemon=True) for number in numbers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return_freed_memory()
    if errors:
        # The lowest thread that failed by itself comes before threads that were stopped because of it.
        raise min(errors.items(), key=lambda item: (isinstance(item[1], _Stopped), item[0]))[1]
    return [results[rank] for rank in range(num_ranks)]
