"""How hidden states become embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

from shardconv_runtime.serving.embedding_ranks import pooled


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_padding_does_not_count(pooling: Any) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 4, 3, dtype=torch.float64)
    hidden[1, 2:] = torch.nan
    states = [hidden[0], hidden[1, :2]]
    chosen = [{"mean": each.mean(0), "first": each[0], "last": each[-1]}[pooling] for each in states]
    want = torch.stack([each / each.norm() for each in chosen])
    assert torch.allclose(pooled(hidden, torch.tensor([4, 2]), pooling), want, rtol=0, atol=1e-15)


def test_embeddings_are_at_least_float32() -> None:
    hidden = torch.ones(1, 2, 3, dtype=torch.bfloat16)
    assert pooled(hidden, torch.tensor([2]), "mean").dtype == torch.float32
