"""Norms over a sharded dim: recognised on the tape, and their formula proven on numbers."""

from __future__ import annotations

import models
import pytest
import torch
import torch.nn.functional as F
from shardconv_runtime.plan import NormInfo, module_plans, parameter_plans
from torch import Tensor, nn

from shardconv.norms import NormSite, find_norms
from shardconv.prove import fit_norm
from shardconv.rules import RULES
from shardconv.tape import Tape
from shardconv.trace import trace


class Holder(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def sites(norm: nn.Module, *shape: int) -> tuple[Tape, list[NormSite]]:
    """The norms that are found in a model with this one."""
    tape = trace(Holder(norm).to("meta"), {"x": torch.randn(*shape)}, RULES)
    return tape, find_norms(tape)


def fitted(norm: nn.Module, size: int = 12) -> NormInfo | None:
    """The formula that is found for a norm."""
    tape, found = sites(norm, 3, 7, size)
    assert [site.fqn for site in found] == ["norm"]
    return fit_norm(norm, found[0], tape, (0,))


class EarlyRms(nn.Module):
    """Multiplies before it casts back."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 3e-6)
        return (self.gain.float() * y).to(x.dtype)


class HandLayer(nn.Module):
    """A layer norm written out; the shift comes first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(size))
        self.gain = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.gain * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class L1(nn.Module):
    """Looks like a norm on the tape, and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(4).mean(-1, keepdim=True) + 1e-6)


class Middle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (nn.LayerNorm(12), {"kind": "layer", "eps": 1e-5, "weight": "weight", "bias": "bias"}),
        (
            nn.LayerNorm(12, eps=1e-3, bias=False),
            {"kind": "layer", "eps": 1e-3, "weight": "weight", "bias": ""},
        ),
        (nn.LayerNorm(12, elementwise_affine=False), {"kind": "layer", "weight": "", "bias": ""}),
        (nn.RMSNorm(12, eps=1e-6), {"kind": "rms", "eps": 1e-6, "weight": "weight"}),
        (
            models.Rms(12, 0.0),
            {"kind": "rms", "eps": 1e-5, "weight_offset": 0.0, "weight_before_cast": False},
        ),
        (models.Rms(12, 1.0), {"kind": "rms", "weight_offset": 1.0, "weight_before_cast": True}),
        (EarlyRms(12), {"kind": "rms", "eps": 3e-6, "weight": "gain", "weight_before_cast": True}),
        (HandLayer(12), {"kind": "layer", "weight": "gain", "bias": "shift"}),
    ],
)
def test_the_formula_is_found(norm: nn.Module, expected: dict[str, object]) -> None:
    info = fitted(norm)
    assert info is not None
    assert {key: getattr(info, key) for key in expected} == expected
    assert (info.size, info.axes) == (12, (0,))


def test_no_formula_for_what_is_no_norm() -> None:
    assert fitted(L1()) is None


@pytest.mark.parametrize("norm", [Middle(), nn.LayerNorm((7, 12)), nn.GroupNorm(7, 7), nn.Softmax(-1)])
def test_other_modules_are_no_sites(norm: nn.Module) -> None:
    assert sites(norm, 3, 7, 12)[1] == []


def test_two_uses_of_an_outer_tensor_are_no_site() -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return F.rms_norm(x, (12,)) * gate

    class Two(Holder):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x, x + 1)

    tape = trace(Two(Gated()), {"x": torch.randn(3, 7, 12)}, RULES)
    assert find_norms(tape) == []


@pytest.mark.parametrize(
    ("model", "kind", "weight"),
    [
        (models.RmsModel, "rms", "scale"),
        (models.OffsetRmsModel, "rms", "scale"),
        (models.LayerNormModel, "layer", "weight"),
    ],
)
@pytest.mark.parametrize("tp", [2, 3, 5])
def test_a_norm_over_a_sharded_dim(model: type[models.OddModel], kind: str, weight: str, tp: int) -> None:
    """``plan_of`` compares the ranks with the whole in float64; 96 on 5 ranks is uneven."""
    plan = models.plan_of(model, tp)
    entry = module_plans(plan)["stack.0.chewer.norm"]
    assert entry.norm is not None
    assert (entry.category, entry.norm.kind, entry.norm.weight, entry.norm.size) == ("norm", kind, weight, 96)
    assert parameter_plans(plan)[f"stack.0.chewer.norm.{weight}"].dims[0] != 96
    assert module_plans(plan)["stack.0.chewer.down"].category == "row"
