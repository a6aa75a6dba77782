"""Simulated ranks that run different collectives: all of them end with an error."""

from __future__ import annotations

import pytest
import torch

from shardconv.simulation.rank_threads import RanksDisagree, ThreadCommunicator, run_ranks


def test_a_rank_that_waits_learns_that_the_other_one_has_left() -> None:
    """The last rank of a collective finds the difference; it may be caught in the rank, which then ends."""

    def rank(comm: ThreadCommunicator) -> str:
        try:
            if comm.rank:
                comm.concatenate(torch.zeros(2), (0,))
            else:
                comm.all_reduce(torch.zeros(2), (0,))
        except RanksDisagree as error:
            return str(error)
        return ""

    waits, leaves = run_ranks((2,), rank)
    assert leaves.startswith("ranks (0, 1) meet in different collectives: all_gather")
    assert waits.startswith("rank 0 waits in all_reduce for ranks (0, 1), of which one has ended")


def test_ranks_that_wait_for_each_other_in_a_circle() -> None:
    """Real processes would hang."""
    axis_of_rank = (1, 0, 0, 1)  # 0 waits for 1, 1 for 3, 3 for 2, and 2 for 0
    with pytest.raises(
        RanksDisagree, match=r"rank 0 waits in all_reduce for ranks \(0, 1\).*waits for others"
    ):
        run_ranks((2, 2), lambda comm: comm.all_reduce(torch.zeros(1), (axis_of_rank[comm.rank],)))
