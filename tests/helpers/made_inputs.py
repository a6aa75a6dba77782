"""What to call a model with, whatever it takes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardconv.dim_analysis.rules import RULES
from shardconv.inputs.trace_inputs import TraceInputs, trace_inputs

PATCH, SIDE = 4, 8


@dataclass
class Vision:
    """An image of ``SIDE`` x ``SIDE`` in patches of ``PATCH``."""

    image_size: int = SIDE
    patch_size: int = PATCH
    num_channels: int = 3
    model_type: str = "vision"

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def make_inputs(model: nn.Module, seed: int = 0) -> TraceInputs:
    """The inputs that ``trace_inputs`` settles on, for a model on any device and of any dtype.

    They are tried on a copy without numbers, in float32, since code may insist on that.
    """
    memo = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    stand_in = copy.deepcopy(model, memo).float()  # type: ignore[arg-type]
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return trace_inputs(stand_in, RULES, seed)[0].to((dtypes or [torch.float32])[0])
