"""Simulated ranks that run different collectives: all of them end with an error."""

from __future__ import annotations

import threading

import torch

from shardconv.simulation.rank_threads import RanksDisagree, _Board


def test_a_rank_that_waits_learns_that_the_other_one_has_left() -> None:
    """The last rank of a collective finds the difference; it may be caught in the rank, which then ends."""
    board, said = _Board(), dict[int, str]()

    def run(rank: int, kind: str) -> None:
        try:
            board.meet(("group", 0), rank, (0, 1), torch.zeros(2), kind, sum)  # type: ignore[arg-type]
        except RanksDisagree as error:
            said[rank] = str(error)
        board.leave(rank, failed=False)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in ((0, "sum"), (1, "gather"))]
    threads[0].start()
    while not board._meetings:
        pass
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert said[1].startswith("ranks (0, 1) meet in different collectives: gather")
    assert said[0].startswith("rank 0 waits in sum for ranks (0, 1), of which one has ended")
