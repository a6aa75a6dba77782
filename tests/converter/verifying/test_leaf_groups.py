"""Sizes that a mask of the inputs counts do not shrink."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.rules import RULES
from shardconv.tracing.fold import fold
from shardconv.tracing.trace import trace
from shardconv.verifying.shrinking.leaf_groups import leaf_groups

QUERIES, WIDTH = 12, 40


class Fills(nn.Module):
    """Puts what it makes of its queries in the places of a mask."""

    def __init__(self, by_index: bool) -> None:
        super().__init__()
        self.by_index = by_index
        self.queries = nn.Parameter(torch.zeros(QUERIES, WIDTH))
        self.make = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        made = self.make(self.queries)
        if not self.by_index:
            return x.masked_scatter(places[..., None], made)
        x = x.clone()
        x[places] = made
        return x


@pytest.mark.parametrize("by_index", [False, True])
def test_rows_that_fill_the_places_of_a_mask_keep_their_number(by_index: bool) -> None:
    places = torch.arange(19) < QUERIES
    model = Fills(by_index).to("meta")
    folded = fold(trace(model, {"x": torch.randn(19, WIDTH), "places": places}, RULES))
    groups = leaf_groups(analyze(folded.tape, folded.ties), folded.ties, ())
    assert QUERIES not in {group.size for group in groups}
