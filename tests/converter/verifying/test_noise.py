"""Without noise, code that draws random numbers gets their medians, whatever was drawn before."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardconv.simulation.model_runs import Float64, WithoutNoise


def drawn(x: Tensor) -> dict[str, Tensor]:
    """All that is known, of ``x``'s shape."""
    return {
        "rand": torch.rand(x.shape),
        "rand_like": torch.rand_like(x),
        "randn": torch.randn(x.shape),
        "uniform": torch.empty_like(x).uniform_(1, 4),
        "unit": torch.empty_like(x).uniform_(),
        "normal": torch.empty_like(x).normal_(3.0, 2.0),
        "exponential": torch.empty_like(x).exponential_(2.0),
        "dropout": F.dropout(x, 0.5, training=True),
    }


def test_random_numbers_are_medians() -> None:
    x = torch.full((50_001,), 7.0)
    torch.manual_seed(0)
    medians = {name: values.median().item() for name, values in drawn(x).items()}
    with WithoutNoise():
        found = drawn(x)
    for name, values in found.items():
        assert (values == values[0]).all(), name
        if name != "dropout":
            assert values[0].item() == pytest.approx(medians[name], abs=0.03), name
    assert found["dropout"] is x
    assert found["exponential"][0] == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts_to_smaller_dtypes_keep_float64(dtype: torch.dtype) -> None:
    exact = torch.tensor(1 / 3, dtype=torch.float64)
    with Float64():
        assert exact.to(dtype).equal(exact)
        assert exact.to(dtype=dtype).equal(exact)
        assert exact.to(torch.long) == 0
