"""Which optimizers need full tensors, by trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardconv_runtime.training.optimizer_guards import TrialError, needs_full_tensors
from torch import Tensor, nn
from torch.optim import Optimizer


class Toy(Optimizer):
    """Moves parameters by a function of their gradients."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 1e-2} | options)

    def change(self, group: dict[str, Any]) -> list[Tensor]:
        return [p.grad for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter, change in zip(group["params"], self.change(group), strict=True):
                parameter.add_(change, alpha=-group["lr"])


class Normed(Toy):
    """Divides by the norm of each gradient."""

    def change(self, group: dict[str, Any]) -> list[Tensor]:
        return [p.grad / p.grad.norm() for p in group["params"]]


class Clipped(Toy):
    """Clips by the norm of all gradients."""

    def change(self, group: dict[str, Any]) -> list[Tensor]:
        norm = torch.cat([p.grad.flatten() for p in group["params"]]).norm()
        return [p.grad / norm.clamp_min(1) for p in group["params"]]


class Centered(Toy):
    """Subtracts the mean of each row."""

    def change(self, group: dict[str, Any]) -> list[Tensor]:
        return [p.grad - p.grad.mean(-1, keepdim=True) for p in group["params"]]


class Late(Toy):
    """Begins to precondition after some steps."""

    def change(self, group: dict[str, Any]) -> list[Tensor]:
        group["count"] = group.get("count", 0) + 1
        return [p.grad / p.grad.norm() if group["count"] > 25 else p.grad for p in group["params"]]


class OfChosenGroups(Toy):
    """Divides by norms only in groups that ask for it."""

    def change(self, group: dict[str, Any]) -> list[Tensor]:
        return [p.grad / p.grad.norm() if group["normed"] else p.grad for p in group["params"]]


class Around(Toy):
    """Keeps its parameters itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.kept = [p for group in self.param_groups for p in group["params"]]


class Idle(Toy):
    """Does nothing."""

    def change(self, group: dict[str, Any]) -> list[Tensor]:
        return [torch.zeros_like(p) for p in group["params"]]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))]


def groups(normed: bool) -> list[dict[str, Any]]:
    return [{"params": parameters(), "normed": False}, {"params": parameters(), "normed": normed}]


@pytest.mark.parametrize(
    ("kind", "options", "needs_full"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, False),
        (torch.optim.AdamW, {}, False),
        (torch.optim.AdamW, {"fused": True}, False),
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}, False),
        (torch.optim.AdamW, {"lr": 0.0}, False),
        (torch.optim.Adam, {"lr": torch.tensor(0.0)}, False),
        (torch.optim.RMSprop, {"centered": True}, False),
        (torch.optim.Rprop, {}, False),
        (torch.optim.Adafactor, {}, True),
        (Toy, {}, False),
        (Normed, {}, True),
        (Clipped, {}, True),
        (Centered, {}, True),
        (Late, {}, True),
    ],
)
def test_what_they_need(kind: Any, options: dict[str, Any], needs_full: bool) -> None:
    optimizer = kind(parameters(), **options)
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    state = torch.get_rng_state()
    assert needs_full_tensors(optimizer) == needs_full
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), state)


def test_options_of_groups() -> None:
    assert not needs_full_tensors(OfChosenGroups(groups(normed=False)))
    assert needs_full_tensors(OfChosenGroups(groups(normed=True)))


def test_matrices_alone() -> None:
    assert needs_full_tensors(torch.optim.Muon(parameters()[:1]))


def test_after_steps_under_a_schedule() -> None:
    optimizer = torch.optim.AdamW(parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    schedule.step()
    assert "step" in vars(optimizer)  # put in place by the schedule
    assert not needs_full_tensors(optimizer)
    assert len(optimizer.state) == 2


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (torch.optim.LBFGS, "_params holds parameters"),
        (Around, "kept holds parameters"),
        (Idle, "changes nothing"),
    ],
)
def test_those_that_cannot_be_tried(kind: Any, says: str) -> None:
    with pytest.raises(TrialError, match=says):
        needs_full_tensors(kind(parameters()))
