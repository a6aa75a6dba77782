"""What hooks of users are given of padded sequences; tests/field/test_hooks_of_trainers.py has real ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.plan import HookPlan, HookPort
from shardconv_runtime.parallel.user_hooks import hooks_with_messages, watch_hooks
from torch import Tensor, nn

LENGTH, PADDED = 5, 6


class Heads(nn.Module):
    """Returns heads for each token: ``[B, S, 4, 3]``."""

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return x.unflatten(-1, (4, 3))


class Model(nn.Module):
    """Calls one module."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = Heads()
        self.other = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        made: Tensor = self.heads(x)
        return made


@pytest.fixture
def model() -> Model:
    """A model whose only rank has a padded sequence."""
    made = Model()
    comm: Any = SimpleNamespace(
        mesh=(1,), rank=0, sequence=(LENGTH, PADDED), real=lambda axes: (), num_ranks=lambda axes: 1
    )
    hooks = (HookPlan(("heads",), (HookPort("input.x", (), (0,)),), (HookPort("output", (), (0,)),)),)
    plan: Any = SimpleNamespace(hooks=hooks, stages=None)
    watch_hooks(made, plan, comm, training=True)
    return made


def test_tokens_of_padding_are_not_shown_and_come_back(model: Model) -> None:
    shapes: list[torch.Size] = []

    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        shapes.append(output.shape)
        return 2 * output

    model.heads.register_forward_hook(double)
    model.heads.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    x = torch.randn(2, PADDED, 12)
    wanted = Heads()(x).clone()
    wanted[:, :LENGTH] *= 2
    assert torch.equal(model(x), wanted)
    assert shapes == [(2, LENGTH, 12), (2, LENGTH, 4, 3)]


def test_hooks_that_communicate_are_known_until_they_are_removed(model: Model) -> None:
    assert hooks_with_messages(model) == ""
    handle = model.heads.register_forward_hook(lambda module, args, output: None)
    assert hooks_with_messages(model) == "heads"
    handle.remove()
    assert hooks_with_messages(model) == ""


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "backward", "full_backward", "full_backward_pre"])
def test_modules_that_the_plan_does_not_list_take_raw_hooks_only(model: Model, kind: str) -> None:
    name = f"register_{kind}_hook"
    with pytest.raises(PlanError, match=rf"a hook on other would .* torch\.nn\.Module\.{name}"):
        getattr(model.other, name)(lambda *_: None)
    getattr(nn.Module, name)(model.other, lambda *_: None)


def test_other_tensors_back_are_refused(model: Model) -> None:
    model.heads.register_forward_hook(lambda module, args, output: (output, output))
    with pytest.raises(PlanError, match=r"was given the tensors output and gave back output\.0, output\.1"):
        model(torch.randn(2, PADDED, 12))
