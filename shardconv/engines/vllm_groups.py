"""Makes vLLM's process groups for one rank without the others: it may ask who it is, and cannot
communicate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed import parallel_state


class LoneGroup(parallel_state.GroupCoordinator):  # type: ignore[misc]
    """A group of which this process knows its place only."""

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        *_: Any,
        group_name: str | None = None,
        **__: Any,
    ) -> None:
        self.unique_name = parallel_state._get_unique_name(group_name or "anonymous")
        parallel_state._register_group(self)
        self.rank = torch.distributed.get_rank()
        self.local_rank = local_rank
        self.group_ranks = group_ranks
        self.ranks = next(ranks for ranks in group_ranks if self.rank in ranks)
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.rank)
        self.device = torch.device("cpu")
        self.cpu_group = self.device_group = torch.distributed.new_group(self.ranks, backend="fake")
        self.device_communicator = self.mq_broadcaster = None
        self.use_device_communicator = self.use_custom_op_call = self.use_cpu_custom_send_recv = False


@contextmanager
def lone_rank(rank: int, tp: int) -> Iterator[None]:
    """Let vLLM make its groups for one rank of ``tp``, without the other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch's way to have a rank alone

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
    with patch.object(parallel_state, "GroupCoordinator", LoneGroup):
        world = LoneGroup([list(range(tp))], rank, group_name="world")
        parallel_state._WORLD, parallel_state._NODE_COUNT = world, 1
        parallel_state.initialize_model_parallel(tp, 1, backend="fake")
        yield
