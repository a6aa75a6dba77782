"""Ranks that hang: the test says where each of them waits."""

from __future__ import annotations

import os
import time

import distributed
import pytest
from distributed import RankFailed, run_processes


def wait_for_another() -> None:
    import torch
    import torch.distributed as dist

    if os.environ["RANK"] == "1":
        time.sleep(60)
    dist.all_reduce(torch.ones(2))


def test_each_rank_says_where_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "TIMEOUT_S", 3)
    with pytest.raises(RankFailed) as caught:
        run_processes(2, wait_for_another, start_group=True)
    first, second = str(caught.value).split("rank 1: ")
    assert "in all_reduce" in first
    assert "in all_reduce" not in second
    assert "in wait_for_another" in second
