"""Which of many experts a traced call sends tokens to."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from shardconv_runtime.errors import SolveError
from torch import Tensor, nn

from shardconv.dim_analysis.rules import RULES
from shardconv.inputs.example_inputs import read_example
from shardconv.inputs.trace_inputs import trace_inputs
from shardconv.tracing.tape import Op, Tape

EXPERTS, ZERO = 150, 16


class Chosen(nn.Module):
    """Calls each expert that a token chose; the last of all give back what they get."""

    def __init__(self, modules: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.router = nn.Linear(8, EXPERTS + ZERO, bias=False)
        self.modules_of_experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS * modules))
        self.stacked = None if modules else nn.Parameter(torch.empty(EXPERTS, 8, 8))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).flatten(0, 1)
        scores, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        mask = nn.functional.one_hot(chosen, EXPERTS + ZERO).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for index in mask.sum((-1, -2)).nonzero().flatten().tolist():
            place, token = torch.where(mask[index])
            y = x[token]
            if index < EXPERTS:
                y = (
                    nn.functional.linear(y, self.stacked[index])
                    if self.stacked is not None
                    else self._one(index, y)
                )
            out.index_add_(0, token, y * scores[token, place, None])
        return out

    def _one(self, index: int, x: Tensor) -> Tensor:
        found: Tensor = self.modules_of_experts[index](x)
        return found


def sums(tape: Tape) -> int:
    """How many experts were called."""
    return sum(isinstance(event, Op) and event.name.startswith("aten.index_add") for event in tape.events)


@pytest.mark.parametrize("modules", [False, True])
def test_all_experts_that_are_modules_are_called_and_some_of_those_that_share_a_parameter(
    modules: bool,
) -> None:
    with torch.device("meta"):
        model = Chosen(modules)
    inputs, tape = trace_inputs(model, RULES)
    read = {tid for event in tape.events for tid in getattr(event, "inputs", ())}
    assert all(tid in read for tid, info in enumerate(tape.tensors) if info.kind == "parameter")
    products = sum(isinstance(e, Op) and e.name.startswith("aten.linear") for e in tape.events) - 1
    assert inputs.few_chosen is not modules
    if modules:
        assert inputs.tensors["input_ids"].numel() >= EXPERTS
        assert products == EXPERTS
    else:
        assert 2 < products < 10
    assert sums(tape) > products, "some tokens are given back"


class Numbered(Chosen):
    """Its experts have layers whose names end in numbers."""

    def __init__(self) -> None:
        super().__init__(modules=False)
        self.stacked = None
        self.modules_of_experts = nn.ModuleList(
            nn.Sequential(OrderedDict(fc1=nn.Linear(8, 24), fc2=nn.Linear(24, 8))) for _ in range(EXPERTS)
        )


def test_numbers_inside_of_experts_are_not_theirs() -> None:
    with torch.device("meta"):
        model = Numbered()
    inputs, tape = trace_inputs(model, RULES)
    read = {tid for event in tape.events for tid in getattr(event, "inputs", ())}
    assert all(tid in read for tid, info in enumerate(tape.tensors) if info.kind == "parameter")
    assert not inputs.few_chosen


def test_an_example_reaches_every_expert_that_is_a_module() -> None:
    with torch.device("meta"):
        model = Chosen(modules=True)
    ids = torch.arange(3 * 64).reshape(3, 64) % 50
    inputs, tape = trace_inputs(model, RULES, example=read_example({"input_ids": ids}))
    assert torch.equal(inputs.tensors["input_ids"], ids)
    assert sum(isinstance(e, Op) and e.name.startswith("aten.linear") for e in tape.events) == EXPERTS + 1
    few = read_example({"input_ids": ids[:, :7]})
    with pytest.raises(SolveError, match=f"has too few tokens: .*give at least {EXPERTS} tokens"):
        trace_inputs(model, RULES, example=few)
