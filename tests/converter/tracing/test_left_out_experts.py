"""Batches are large enough to send a token to each expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardconv.dim_analysis.rules import RULES
from shardconv.tracing.inputs import trace_inputs
from shardconv.tracing.tape import reads_and_writes


class ManyExperts(nn.Module):
    """Each token goes to one of more experts than an ordinary batch has tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 8)
        self.router = nn.Linear(8, count)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(8, 8) for i in range(count)})

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids).flatten(0, 1)
        chosen = self.router(hidden).argmax(-1)
        for number in chosen.unique().tolist():
            hidden = torch.where(
                (chosen == number)[:, None], self.experts[f"expert_{number}"](hidden), hidden
            )
        return hidden


def test_there_are_as_many_tokens_as_experts() -> None:
    inputs, tape = trace_inputs(ManyExperts(150).to("meta"), RULES)
    assert inputs.tensors["input_ids"].numel() >= 150
    read = {tid for event in tape.events for tid in reads_and_writes(event)[0]}
    weights = [tid for tid, info in enumerate(tape.tensors) if info.kind == "parameter"]
    assert read.issuperset(weights)
