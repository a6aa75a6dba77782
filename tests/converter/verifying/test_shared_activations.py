"""Activations that are the same on several simulated ranks are kept once, and gradients stay the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardconv.simulation.available_memory import SharedActivations

SIDE = 80


def _loss(shared: SharedActivations, weight: Tensor, x: Tensor) -> Tensor:
    """A loss of a rank, which keeps ``sin(x @ w)``."""
    with shared.of_a_rank():
        hidden = torch.sin(x @ weight)
        return (hidden * hidden).sum()


def test_equal_ones_are_kept_once_and_different_ones_apart() -> None:
    shared, generator = SharedActivations(), torch.Generator().manual_seed(0)
    x = torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64)
    weights = [torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64) for _ in range(2)]
    ranks = [weight.clone().requires_grad_() for weight in (weights[0], weights[0], weights[1])]
    losses = [_loss(shared, rank, x) for rank in ranks]
    assert max(map(len, shared._kept.values())) == 2  # two of three ranks are alike
    for loss in losses:
        loss.backward()
    for rank in ranks:
        alone = rank.detach().clone().requires_grad_()
        torch.sin(x @ alone).square().sum().backward()
        assert rank.grad is not None
        assert alone.grad is not None
        torch.testing.assert_close(rank.grad, alone.grad, rtol=1e-13, atol=1e-12)
    del loss, losses
    assert not any(map(len, shared._kept.values()))


def test_what_was_written_to_since_is_an_error() -> None:
    weight = torch.ones(SIDE, SIDE, requires_grad=True)
    with SharedActivations().of_a_rank():
        hidden = torch.sin(weight * 1.0)
        loss = (hidden * hidden).sum()
        hidden.detach().zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
