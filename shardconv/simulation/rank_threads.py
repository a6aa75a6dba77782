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


class _Turns:
    """Let one thread run at a time, until it waits for others.

    The thread that is furthest behind among the ones that can run gets its turn; threads report their
    positions. All start from the caller's random states, like ranks with the same seed. torch, numpy and
    Python have one random state each for all threads, so these are exchanged when a thread's turn begins and
    ends.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._waiting = dict.fromkeys(numbers, 0)
        """Position of each thread that waits for its turn, or has not begun."""
        self._start = _random_states()
        self._states: dict[int, tuple[Tensor, HostStates]] = {}

    def begin(self, number: int, position: int) -> None:
        """Wait until no other thread runs, and no thread that is further behind is ready to run."""
        with self._changed:
            self._wait(number, position)
        _set_random_states(self._states.get(number, self._start))

    def end(self, number: int) -> None:
        """Let another thread run."""
        self._states[number] = _random_states()
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()

    def wait(self, number: int, position: int) -> None:
        """Let threads that are further behind run, until they wait for something else."""
        self._states[number] = _random_states()
        with self._changed:
            self._is_taken = False
            self._wait(number, position)
        _set_random_states(self._states[number])

    def _wait(self, number: int, position: int) -> None:
        self._waiting[number] = position
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: (
                not self._is_taken
                and number == min(self._waiting, key=lambda number: (self._waiting[number], number))
            )
        )
        del self._waiting[number]
        self._is_taken = True


class _Board:
    """Collectives of threads, guarded by one lock. The last rank of a collective computes for all."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._meetings: dict[tuple[object, ...], _Meeting] = {}
        self._gone: set[int] = set()
        self._failed = False

    def meet(
        self,
        key: tuple[object, ...],
        rank: int,
        members: tuple[int, ...],
        x: Tensor,
        kind: str,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Tensor:
        """Submit ``x``, wait for the other ``members``, and return a copy of the result."""
        with self._changed:
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
                self._changed.notify_all()
            self._changed.wait_for(lambda: meeting.result is not None or self._is_lost(meeting, members))
            if meeting.result is not None:
                return meeting.result.clone()
            if self._failed:
                raise _Stopped
            raise RanksDisagree(f"rank {rank} waits in {kind} for ranks {members}, of which one has ended")

    def leave(self, rank: int, failed: bool) -> None:
        """End this thread's part, so that other threads stop waiting for it."""
        with self._changed:
            self._gone.add(rank)
            self._failed |= failed
            self._changed.notify_all()

    def require_going_on(self) -> None:
        """Stop this thread if another one has failed."""
        with self._changed:
            if self._failed:
                raise _Stopped

    def _is_lost(self, meeting: _Meeting, members: tuple[int, ...]) -> bool:
        return self._failed or any(m in self._gone and m not in meeting.tensors for m in members)


class Turn:
    """The right of one thread to run."""

    def __init__(self, number: int, board: _Board, turns: _Turns) -> None:
        self.number = number
        """The rank, or ``BESIDE``."""
        self._board = board
        self._turns = turns
        self._position = 0

    def begin(self) -> None:
        """Wait for the turn."""
        self._turns.begin(self.number, self._position)

    def end(self) -> None:
        """End the turn."""
        self._turns.end(self.number)

    def wait_for_others(self, position: int) -> None:
        """Report the position of this thread; threads that are further behind run first."""
        self._position = max(self._position, position)
        self._turns.wait(self.number, self._position)
        self._board.require_going_on()


class ThreadCommunicator(Communicator):
    """Communicator of a rank that is a thread. Sums go in rank order, so that all ranks get the same bits.

    It can be used in several runs, so that a model can keep it.
    """

    turn: Turn
    """The turn of this rank in the current run."""

    def begin(self, board: _Board, turn: Turn) -> None:
        """Take part in a run."""
        self.turn = turn
        self._board = board
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
        self.turn.end()
        try:
            return self._board.meet(key, self.rank, members, x, kind, combine)
        finally:
            self.turn.begin()


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
    board, turns = _Board(), _Turns(numbers)
    ranks = ranks or communicators(mesh)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(turn: Turn) -> None:
        turn.begin()
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                if turn.number != BESIDE:
                    ranks[turn.number].begin(board, turn)
                    results[turn.number] = function(ranks[turn.number])
                elif beside is not None:
                    beside(turn)
        except BaseException as error:
            errors[turn.number] = error
        finally:
            turn.end()
            board.leave(turn.number, failed=turn.number in errors)

    threads = [
        threading.Thread(target=run, args=(Turn(number, board, turns),), daemon=True) for number in numbers
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
