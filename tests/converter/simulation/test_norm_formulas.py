"""Norms over a sharded dim: recognised on the tape, and their formula proven on numbers."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
import torch.nn.functional as F
from shardconv_runtime.format.plan import NormInfo, module_plans, parameter_plans
from torch import Tensor, nn

from shardconv.dim_analysis.norm_sites import NormSite, find_norms
from shardconv.dim_analysis.rules import RULES
from shardconv.simulation.norm_formulas import fit_norm
from shardconv.tracing.tape import Tape
from shardconv.tracing.trace import trace


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
    return fit_norm(norm, found[0], tape)


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
        (models.UnitLength(), {"kind": "l2", "eps": 1e-6, "weight": ""}),
    ],
)
def test_the_formula_is_found(norm: nn.Module, expected: dict[str, object]) -> None:
    info = fitted(norm)
    assert info is not None
    assert {key: getattr(info, key) for key in expected} == expected
    assert (info.size, info.axes) == (12, ())


def test_no_formula_for_what_is_no_norm() -> None:
    assert fitted(L1()) is None


@pytest.mark.parametrize("norm", [Middle(), nn.LayerNorm((7, 12)), nn.GroupNorm(7, 7), nn.Softmax(-1)])
def test_other_modules_are_no_sites(norm: nn.Module) -> None:
    assert sites(norm, 3, 7, 12)[1] == []


class Gated(nn.Module):
    """A norm over groups of the last dim, multiplied by a gate before or after."""

    def __init__(self, groups: int, first: bool, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(12))
        self.groups, self.first, self.activation = groups, first, activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        if self.first:
            wide = wide * self.activation(gate.float())
        parts = wide.view(*x.shape[:-1], self.groups, 12 // self.groups)
        y = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + 1e-5)).view(*x.shape)
        y = self.scale * y.to(x.dtype)
        return y if self.first else (y * self.activation(gate.float())).to(x.dtype)


class Halves(nn.Module):
    """Gives the norm two arguments."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + 1, gate=x * 2)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("activation", [F.silu, torch.sigmoid, lambda x: x])
def test_gated_norms_over_groups(groups: int, first: bool, activation: Callable[[Tensor], Tensor]) -> None:
    norm = Gated(groups, first, activation)
    tape = trace(Halves(norm).to("meta"), {"x": torch.randn(3, 7, 12)}, RULES)
    (site,) = find_norms(tape)
    assert (site.groups, site.arguments) == (groups, ("x", "gate"))
    info = fit_norm(norm, site, tape)
    assert info is not None
    assert (info.kind, info.size, info.groups, info.weight) == ("rms", 12 // groups, (groups,), "scale")
    name = getattr(activation, "__name__", "")
    assert info.gate_activation == (name if name in ("silu", "sigmoid") else "identity")
    assert info.input
    assert info.gate
    if groups == 3 or info.gate_activation != "identity":
        assert (info.input, info.gate, info.gate_first) == ("x", "gate", first)


@pytest.mark.parametrize("tp", [2, 3, 4, 6])
def test_a_gated_norm_of_two_groups(tp: int) -> None:
    """Whole groups on the first mesh axis, parts of them on the others; ``plan_of`` compares numbers."""
    plan = models.plan_of(models.GatedNormModel, tp)
    entry = module_plans(plan)["stack.0.chewer.norm"]
    assert entry.norm is not None
    assert (entry.norm.gate, entry.norm.gate_activation, entry.norm.gate_first) == ("opener", "silu", True)
    assert entry.norm.axes if tp > 2 else not entry.norm.axes
    assert module_plans(plan)["stack.0.chewer.down"].category == "row"
    assert all(b.op != "all_gather" for m in plan.modules for b in m.inputs)


@pytest.mark.parametrize(
    ("model", "kind", "weight"),
    [
        (models.RmsModel, "rms", "scale"),
        (models.OffsetRmsModel, "rms", "scale"),
        (models.LayerNormModel, "layer", "weight"),
        (models.UnitLengthModel, "l2", ""),
    ],
)
@pytest.mark.parametrize("tp", [*(pytest.param(tp, marks=pytest.mark.slow) for tp in (2, 3)), 5])
def test_a_norm_over_a_sharded_dim(model: type[models.OddModel], kind: str, weight: str, tp: int) -> None:
    """``plan_of`` compares the ranks with the whole in float64; 96 on 5 ranks is uneven."""
    plan = models.plan_of(model, tp)
    entry = module_plans(plan)["stack.0.chewer.norm"]
    assert entry.norm is not None
    assert (entry.category, entry.norm.kind, entry.norm.weight, entry.norm.size) == ("norm", kind, weight, 96)
    if weight:
        assert parameter_plans(plan)[f"stack.0.chewer.norm.{weight}"].dims[0] != 96
    assert module_plans(plan)["stack.0.chewer.down"].category == "row"
