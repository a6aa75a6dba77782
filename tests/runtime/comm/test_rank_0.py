"""What rank 0 alone does for all ranks."""

from __future__ import annotations

import random

import numpy
import torch
from shardconv_runtime.comm.rank_0 import without_drawing


def test_numbers_that_rank_0_alone_draws_leave_its_states_as_they_are() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    def seed() -> None:
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = draw()
    seed()
    with without_drawing():
        draw()
    assert draw() == expected
