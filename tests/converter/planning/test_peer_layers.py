"""What is ruled out in one layer is ruled out in all layers that do the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.dim_trees import find, leaves
from shardconv.dim_analysis.rules import RULES
from shardconv.planning.conflict import Conflict
from shardconv.planning.fused_layers import PeerLayers
from shardconv.tracing.trace import trace


class Layers(nn.Module):
    """Layers that write to states which were made before them; the last one is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 7)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * 2)
        return x


def test_an_conflict_is_met_in_all_layers_that_do_the_same() -> None:
    tape = trace(Layers().to("meta"), {"x": torch.randn(5, 12)}, RULES)
    analysis = analyze(tape, ())
    rows = {
        info.name: find(leaves(analysis.dims[tid][0])[0])
        for tid, info in enumerate(tape.tensors)
        if info.name.endswith("weight")
    }
    found = PeerLayers(analysis).widened(Conflict((rows["layers.1.weight"],), "layers.1"))
    ruled_out = {name for name, row in rows.items() if row in found.nodes}
    assert ruled_out == {"layers.0.weight", "layers.1.weight", "layers.2.weight"}
    assert found.where == "layers.1"
    assert PeerLayers(analysis).widened(Conflict((), "x")).nodes == ()
