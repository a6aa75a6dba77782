"""All ranks of a mesh as threads of one process, to prove a plan without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.format.slices import Mesh
from torch import Tensor

T = TypeVar("T")


class RanksDisagree(RuntimeError):
    """The ranks do not run the same collectives; real processes would hang."""


class _Stopped(Exception):
    """This rank was waiting when another one failed."""


@dataclass
class _Meeting:
    """One collective of one group: the tensors handed in, and the result once all are there."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    kinds: set[tuple[object, ...]] = field(default_factory=set)
    result: Tensor | None = None


class _Turns:
    """One rank runs at a time, until it waits for others: each has random numbers of its own.

    All start from the caller's state, as ranks do that were seeded alike. torch has one state for all
    threads; it is exchanged when a rank's turn begins and ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start = torch.get_rng_state()
        self._states: dict[int, Tensor] = {}

    def begin(self, rank: int) -> None:
        """Wait until no other rank runs."""
        self._lock.acquire()
        torch.set_rng_state(self._states.get(rank, self._start))

    def end(self, rank: int) -> None:
        """Let another rank run."""
        self._states[rank] = torch.get_rng_state()
        self._lock.release()


class _Board:
    """Where the threads meet. One lock guards it; a collective's last rank computes for all."""

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
        """Hand in ``x``, wait for the other ``members``, take a copy of the result."""
        with self._changed:
            meeting = self._meetings.setdefault(key, _Meeting())
            meeting.tensors[rank] = x
            meeting.kinds.add((kind, tuple(x.shape), x.dtype))
            if len(meeting.tensors) == len(members):
                meeting.result = _combine(meeting, members, combine)
                del self._meetings[key]
                self._changed.notify_all()
            self._changed.wait_for(lambda: meeting.result is not None or self._is_lost(meeting, members))
            if meeting.result is not None:
                return meeting.result.clone()
            if self._failed:
                raise _Stopped
            raise RanksDisagree(f"rank {rank} waits in {kind} for ranks {members}, of which one has ended")

    def leave(self, rank: int, failed: bool) -> None:
        """This rank's function has ended: others do not wait for it any more."""
        with self._changed:
            self._gone.add(rank)
            self._failed |= failed
            self._changed.notify_all()

    def _is_lost(self, meeting: _Meeting, members: tuple[int, ...]) -> bool:
        return self._failed or any(m in self._gone and m not in meeting.tensors for m in members)


class ThreadCommunicator(Communicator):
    """One rank that is a thread; sums go in rank order, so that all ranks get the same bits."""

    def __init__(self, rank: int, mesh: Mesh, board: _Board, turns: _Turns) -> None:
        super().__init__(rank, mesh)
        self._board = board
        self._turns = turns
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
        self._turns.end(self.rank)
        try:
            return self._board.meet(key, self.rank, members, x, kind, combine)
        finally:
            self._turns.begin(self.rank)


def run_ranks(mesh: Mesh, function: Callable[[Communicator], T]) -> list[T]:
    """Run ``function`` once for each rank of ``mesh``, in turns, and return the results by rank.

    Each thread has the caller's grad and inference mode and random state. ``function`` must not change
    anything that the ranks share, such as a model.

    Raises:
        RanksDisagree: ranks ran different collectives, or some ran fewer.
        Exception: that of the lowest failing rank; the others are stopped.
    """
    num_ranks = torch.Size(mesh).numel()
    board, turns = _Board(), _Turns()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(rank: int) -> None:
        turns.begin(rank)
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                results[rank] = function(ThreadCommunicator(rank, mesh, board, turns))
        except BaseException as error:
            errors[rank] = error
        finally:
            turns.end(rank)
            board.leave(rank, failed=rank in errors)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise _first_cause(errors)
    return [results[rank] for rank in range(num_ranks)]


def _first_cause(errors: dict[int, BaseException]) -> BaseException:
    """The error of the lowest rank that failed by itself, not because another one had."""
    return min(errors.items(), key=lambda item: (isinstance(item[1], _Stopped), item[0]))[1]


def _combine(
    meeting: _Meeting, members: tuple[int, ...], combine: Callable[[list[Tensor]], Tensor]
) -> Tensor:
    if len(meeting.kinds) > 1:
        kinds = ", ".join(sorted(f"{kind} of {shape} {dtype}" for kind, shape, dtype in meeting.kinds))
        raise RanksDisagree(f"ranks {members} meet in different collectives: {kinds}")
    return combine([meeting.tensors[member] for member in members])
