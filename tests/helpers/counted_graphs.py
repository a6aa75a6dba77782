"""Compiles a module without a compiler, and counts the products in its graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def compiled_and_counted(module: nn.Module) -> tuple[Any, list[int]]:
    """The module in graphs that are run as they were captured, and for each graph so far its products."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(sum("linear" in str(node.target) for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend), graphs
