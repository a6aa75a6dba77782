"""Code that takes a row-parallel layer's weights instead of calling it is noticed in the first pass."""

from __future__ import annotations

import pytest
import torch
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.plan import ModulePlan
from shardconv_runtime.training.prepare import watch_first_pass
from torch import Tensor, nn
from torch.nn import functional


class Mixer(nn.Module):
    """With a kernel, the last layer is a part of it."""

    def __init__(self, has_kernel: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.has_kernel = has_kernel

    def forward(self, x: Tensor, is_short: bool = False) -> Tensor:
        if is_short:
            return x
        inner = self.up(x)
        if self.has_kernel:
            return functional.linear(inner, self.down.weight, self.down.bias)
        out: Tensor = self.down(inner)
        return out


def watched(mixer: Mixer) -> nn.Module:
    model = nn.Sequential(mixer)
    plans = (ModulePlan(("0.up",), "column"), ModulePlan(("0.down",), "row"))
    watch_first_pass(model, {plan.names[0]: plan for plan in plans})
    return model


def test_a_fused_kernel_is_noticed() -> None:
    with pytest.raises(PlanError, match=r"^0 computes sharded activations and returns without calling"):
        watched(Mixer(has_kernel=True))(torch.ones(2, 4))


def test_a_pass_that_calls_all_is_watched_once() -> None:
    model = watched(Mixer(has_kernel=False))
    for _ in range(2):
        assert model(torch.ones(2, 4)).shape == (2, 4)
        assert not any(module._forward_hooks for module in model.modules())


def test_a_pass_that_splits_nothing_shows_nothing() -> None:
    mixer = Mixer(has_kernel=False)
    model = watched(mixer)
    assert mixer(torch.ones(2, 4), is_short=True).shape == (2, 4)
    assert all(module._forward_hooks for module in mixer.modules())
    mixer.has_kernel = True
    with pytest.raises(PlanError, match="computes sharded activations"):
        model(torch.ones(2, 4))
