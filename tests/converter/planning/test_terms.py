"""Where a module returns its input, one rank may keep a replicated tensor as a term of a sum."""

from __future__ import annotations

import models
import pytest
import torch
import torch.nn.functional as F
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.module_steps import KeepOnFirstStep
from shardconv_runtime.format.plan import Plan, parameter_plans
from torch import Tensor, nn

TP = 4


class SomeTokensPass(nn.Module):
    """Two experts in a stack; one that is the identity, for other numbers of tokens in each call."""

    def __init__(self, config: models.OddConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(2, config.girth, config.width))
        self.down = nn.Parameter(torch.empty(2, config.width, config.girth))
        self.weight = nn.Linear(config.width, 1)
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights = self.weight(tokens).sigmoid()
        rows = torch.arange(len(tokens), device=x.device)
        total = torch.zeros_like(tokens)
        for expert in range(4):
            chosen = rows[rows % 7 % 4 == expert]
            x_e = tokens[chosen]
            y = self.same(x_e) if expert > 1 else self._expert(expert, x_e)
            total.index_add_(0, chosen, y * weights[chosen])
        return total.view_as(x)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.up[expert]).relu(), self.down[expert])


class Passing(models.OddModel):
    mlp = SomeTokensPass


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Which is proven on numbers, with its gradients."""
    return models.plan_of(Passing, TP)


def test_experts_are_sharded_beside_one_that_is_the_identity(plan: Plan) -> None:
    entries = parameter_plans(plan)
    stacks = [e for n, e in entries.items() if n.endswith((".up", ".down"))]
    assert stacks
    assert all(any(axes_of(d) for d in e.dims) for e in stacks)


def test_one_rank_keeps_what_the_identity_returns(plan: Plan) -> None:
    found = [(m, step) for m in plan.modules for step in m.outputs if isinstance(step, KeepOnFirstStep)]
    assert found
    assert all(name.endswith(".same") for m, _ in found for name in m.names)
    assert {step.axes for _, step in found} == {tuple(range(len(plan.mesh)))}
    assert plan_json.loads(plan_json.dumps(plan)) == plan


def test_it_can_be_trained(plan: Plan) -> None:
    assert plan.training is not None
    assert plan.inference_only == ""
