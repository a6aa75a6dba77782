"""Calls that a rule does not cover are replicated, with a note; an error in a rule is one in tests alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rule_cases import f
from rule_oracle import Program
from torch import Tensor

from shardconv.dim_analysis.analysis import Analysis
from shardconv.dim_analysis.analyze import STRICT_RULES, RuleError, analyze
from shardconv.dim_analysis.rule_builder import NotCovered
from shardconv.dim_analysis.rules import RULES
from shardconv.tracing.tape import Op
from shardconv.tracing.trace import trace

NAME = "aten.silu"


def analysis_of_silu() -> Analysis:
    """Of a module that computes ``silu`` of a parameter ``[4, 6]``."""
    model = Program(torch.nn.functional.silu, (f(4, 6),), "parameter").to("meta")
    return analyze(trace(model, {"one": torch.ones(1, dtype=torch.float64)}, RULES))


def assert_replicated_with_a_note(analysis: Analysis) -> None:
    """The call's operands and results: no dim sharded, none partial."""
    (op,) = (e for e in analysis.tape.events if isinstance(e, Op) and e.name.startswith(NAME))
    assert analysis.unknown == {f"{op.name} as it is called": "body"}
    for tid in (*op.inputs, *op.outputs):
        assert all(dim.blocked for dim in analysis.dims[tid])
        assert analysis.partial[tid].zero


def raising(error: Exception) -> Any:
    """A rule that says something and then fails."""

    def rule(builder: Any, op: Op, args: Any) -> None:
        builder.set(op.outputs[0], builder.tensor(op.inputs[0]))
        raise error

    return rule


ERRORS = [KeyError("dim"), IndexError("1"), TypeError("None"), ValueError("sizes"), AssertionError("sizes")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_in_a_rule_is_one_in_tests(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setitem(RULES, NAME, raising(error))
    with pytest.raises(RuleError, match=f"the rule of aten.silu.default failed: {type(error).__name__}"):
        analysis_of_silu()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_for_users_it_replicates_what_the_call_touches(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.delenv(STRICT_RULES)
    monkeypatch.setitem(RULES, NAME, raising(error))
    assert_replicated_with_a_note(analysis_of_silu())


def test_any_other_error_is_one_for_users_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STRICT_RULES)
    monkeypatch.setitem(RULES, NAME, raising(AttributeError("tids")))
    with pytest.raises(AttributeError, match="tids"):
        analysis_of_silu()


def test_a_rule_says_that_it_does_not_cover_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, NAME, raising(NotCovered()))
    assert_replicated_with_a_note(analysis_of_silu())


def test_a_quotient_of_numbers_is_not_covered() -> None:
    def function(x: Tensor) -> Tensor:
        return x * torch.ops.aten.div.Tensor_mode(7, 2, rounding_mode="trunc")  # as Longformer counts chunks

    model = Program(function, (f(4, 6),), "parameter").to("meta")
    analysis = analyze(trace(model, {"one": torch.ones(1, dtype=torch.float64)}, RULES))
    assert analysis.unknown == {"aten.div.Tensor_mode as it is called": "body"}


class Remembers(torch.nn.Module):
    """Makes a state if it is given none, writes to a part of it, and hands it back."""

    def __init__(self, *, in_place: bool = True) -> None:
        super().__init__()
        self.map = torch.nn.Linear(6, 6)
        self.in_place = in_place

    def forward(self, x: Tensor, state: Tensor | None = None) -> dict[str, Tensor]:
        if state is None:
            state = torch.zeros(x.shape[0], 6, 2)
        y = self.map(x)
        if self.in_place:
            state[:, :, 0] = y
        else:
            state = state + y[..., None]
        return {"y": y, "state": state}


def test_a_state_is_handed_back_as_it_was_made() -> None:
    analysis = analyze(trace(Remembers().to("meta"), {"x": torch.ones(5, 6)}, RULES))
    ((made, returned),) = analysis.handed_back
    maker = next(e for e in analysis.tape.events if isinstance(e, Op) and made in e.outputs)
    assert maker.name == "aten.zeros.default"
    assert (returned,) == analysis.tape.handed_back
    assert returned not in analysis.tape.outputs


def test_another_tensor_in_place_of_a_state_is_free() -> None:
    """What the next call does with it is not known from this one; ranks keep what they have."""
    analysis = analyze(trace(Remembers(in_place=False).to("meta"), {"x": torch.ones(5, 6)}, RULES))
    assert not analysis.handed_back
    assert len(analysis.tape.handed_back) == 1
