"""What ``torch.compile`` imports and looks up once: done before processes are forked, it is done for all."""

from __future__ import annotations

import gc
from functools import cache

import torch
import torch._dynamo
from torch import nn


@cache
def warm_up() -> None:
    """Capture a graph and differentiate it, which takes each process that does it first some seconds."""
    if not (2, 12) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        return  # it would start threads of autograd, after which no forked process could differentiate
    layer = nn.Linear(2, 2)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.ones(1, 2)).sum().backward()
    torch._dynamo.reset()
    gc.freeze()  # the million objects that were imported are in no search for garbage
