"""Which tensors a plan lets hooks of users have: full ones, to whose copies nothing is written later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import models
import pytest
import torch
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import HookPlan, HookPort, Plan, by_name
from torch import Tensor, nn

from shardconv.dim_analysis.rules import RULES
from shardconv.planning.hook_plans import written_later
from shardconv.planning.solution import inference_only
from shardconv.tracing.tape import Mark
from shardconv.tracing.trace import trace


def ports(plan: Plan) -> dict[str, tuple[list[str], list[str]]]:
    """Module -> the inputs and the outputs that hooks are given."""
    return {
        name: ([port.port for port in entry.inputs], [port.port for port in entry.outputs])
        for name, entry in by_name("hooks", plan.hooks).items()
    }


def test_replicated_tensors_are_listed_and_logits_are_not() -> None:
    plan = models.plan_of(models.OddModel, 2)
    found = ports(plan)
    assert found["stack.0.chewer"] == (["input.x"], ["output"]), "its sum is reduced inside"
    assert found["stack.1.mixer.omega"] == ([], ["output"]), "its input is sharded"
    assert found["stack.1.mixer.alpha"] == (["input.input"], []), "its output is sharded"
    assert plan.logits is not None
    assert found[plan.logits.module] == (["input.input"], []), "a caller may leave their gather out"
    assert "" not in found, "the model itself is no inner module"


def test_gradients_that_are_terms_of_sums_are_noted_for_training_only() -> None:
    plan = models.plan_of(models.OddModel, 2)
    for each, axes in ((plan, (0,)), (inference_only(plan), ())):
        entry = by_name("hooks", each.hooks)["stack.0.mixer.alpha"]
        assert entry.inputs == (HookPort("input.input", axes),)


def test_entries_are_checked() -> None:
    plan = models.plan_of(models.OddModel, 2)
    wrong = {
        "hooks[0].names": HookPlan(()),
        "hooks[0].inputs[0].port": HookPlan(("speak",), inputs=(HookPort("output"),)),
        "hooks[0].outputs[0].grad_axes": HookPlan(("speak",), outputs=(HookPort("output", (7,)),)),
        "hooks[0].outputs[0].sequence_axes": HookPlan(("speak",), outputs=(HookPort("output", (), (7,)),)),
        "hooks[0].outputs[0].partial_axes": HookPlan(
            ("speak",), outputs=(HookPort("output", partial_axes=(7,)),)
        ),
    }
    for where, entry in wrong.items():
        with pytest.raises(PlanError) as error:
            plan_json.dumps(replace(plan, hooks=(entry,)))
        assert str(error.value).startswith(where)


class Returns(nn.Module):
    """Returns its argument plus one."""

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return x + 1


class Caller(nn.Module):
    """Does something with what another module returns."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Returns()
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.use(self.inner(x))


@pytest.mark.parametrize(
    ("use", "is_written"),
    [
        (lambda y: y * 2, False),
        (lambda y: y.mul_(2), True),
        (lambda y: y.view(-1).mul_(2).sum() + y, True),
        (lambda y: y.clone().mul_(2), False),
    ],
)
def test_writes_of_a_caller_are_seen(use: Callable[[Tensor], Tensor], is_written: bool) -> None:
    tape = trace(Caller(use), {"x": torch.arange(6.0).reshape(2, 3)}, RULES)
    returned = [
        event.target
        for event in tape.events
        if isinstance(event, Mark) and event.is_output and tape.calls[event.call].fqn == "inner"
    ]
    assert len(returned) == 1
    assert (returned[0] in written_later(tape)) == is_written
