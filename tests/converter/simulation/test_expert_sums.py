"""Experts, however they are run: the same plan, one reduction after them, and equal on numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import models
import pytest
import torch
import transformers
from made_inputs import make_inputs
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.format.slices import ranges
from shardconv_runtime.meta.meta_model import build_model
from torch import Tensor, nn

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan
from shardconv.verifying.proof_case import Case, simulate

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def small(model_type: str) -> ModelSpec:
    """A tiny model of this type."""
    kind = transformers.CONFIG_MAPPING[model_type]
    known = kind().to_dict()
    config = kind(**{k: v for k, v in SIZES.items() if k in known})
    if "q_lora_rank" in known:
        config.num_key_value_heads = config.num_attention_heads
    cls = transformers.AutoModelForCausalLM._model_mapping[kind]
    return ModelSpec(model_type, config, cls, "float32")


@cache
def plan_of(model_type: str, tp: int, implementation: str) -> Plan:
    """The plan of a tiny model that runs its experts in this way, proven on numbers."""
    spec = small(model_type)
    spec.config._experts_implementation = implementation
    return solve_plan(spec, SolveOptions(tp))


def layouts(plan: Plan) -> dict[str, Any]:
    """What every rank holds of every parameter."""
    return {
        name: ([[ranges(d, plan.mesh, rank) for d in e.dims] for rank in range(plan.tp)], e.partial)
        for name, e in parameter_plans(plan).items()
    }


def reductions(plan: Plan, part: str) -> list[str]:
    """Ports at which modules with this in their name reduce."""
    return [
        b.port
        for m in plan.modules
        if any(part in name for name in m.names)
        for b in (*m.inputs, *m.outputs)
        if b.op == "all_reduce"
    ]


@pytest.mark.parametrize(
    ("model_type", "tp"),
    [
        ("gpt_oss", 3),
        pytest.param("mixtral", 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 3, marks=pytest.mark.slow),
    ],
)
def test_a_plan_does_not_depend_on_how_experts_are_run(model_type: str, tp: int) -> None:
    plans = {i: plan_of(model_type, tp, i) for i in IMPLEMENTATIONS}
    want = plans["grouped_mm"]
    for plan in plans.values():
        assert layouts(plan) == layouts(want)
        assert plan.modules == want.modules
    experts = {n: e for n, e in parameter_plans(want).items() if ".experts." in n and len(e.dims) == 3}
    assert experts
    assert all(any(axes_of(d) for d in e.dims) for e in experts.values())
    assert len(reductions(want, ".mlp")) + len(reductions(want, "_moe")) <= 2  # of dense layers, of experts


@pytest.mark.parametrize("model_type", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_plan_made_for_one_way_is_right_for_another(model_type: str) -> None:
    plan = plan_of(model_type, 3, "eager")
    for implementation in IMPLEMENTATIONS:
        spec = small(model_type)
        spec.config._experts_implementation = implementation
        model = build_model(spec.model_class, spec.config, torch.float32)
        outcome = simulate(Case(plan, model, make_inputs(model)))
        assert outcome.worst < 1e-9


def test_guesses_are_told() -> None:
    plan = plan_of("mixtral", 2, "eager")
    assert any(n.startswith("guessed: model.layers.*.mlp.experts: ") for n in plan.notes)
    assert not any(n.startswith("guessed") for n in plan_of("mixtral", 2, "grouped_mm").notes)


# Ways of our own ---------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Four small experts; the subclasses send tokens to them."""

    def __init__(self, config: models.OddConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.width, 4)
        self.up = nn.ModuleList(nn.Linear(config.width, config.girth) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(config.girth, config.width, bias=False) for _ in range(4))

    def expert(self, i: int, x: Tensor) -> Tensor:
        """One expert, on any number of tokens."""
        y: Tensor = self.down[i](self.up[i](x).relu())
        return y

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[T, D]``, and the expert of each ``[T]``."""
        flat = x.reshape(-1, x.shape[-1])
        return flat, self.router(flat).argmax(-1)


class BySizes(Routed):
    """Sorted by expert, then split by counts in a list."""

    def forward(self, x: Tensor) -> Tensor:
        flat, chosen = self.chosen(x)
        order = chosen.argsort(stable=True)
        sizes = torch.bincount(chosen, minlength=4).tolist()
        assert sum(sizes) == flat.shape[0]
        parts = flat[order].split(sizes)
        y = torch.cat([self.expert(i, part) for i, part in enumerate(parts)])
        return y[order.argsort()].view_as(x)


class ByMask(Routed):
    """A mask for each expert; those without tokens are left out."""

    def forward(self, x: Tensor) -> Tensor:
        flat, chosen = self.chosen(x)
        out = torch.zeros_like(flat)
        for i in range(4):
            mask = chosen == i
            if not mask.any():
                continue
            (places,) = torch.where(mask)
            assert len(places) == int(mask.sum())
            out.index_add_(0, places, self.expert(i, flat[mask]))
        return out.view_as(x)


class ByUnique(Routed):
    """Loops over those experts that occur."""

    def forward(self, x: Tensor) -> Tensor:
        flat, chosen = self.chosen(x)
        out = torch.zeros_like(flat)
        for i in chosen.unique():
            places = (chosen == i).nonzero().squeeze(-1)
            out = out.index_add(0, places, self.expert(int(i), flat[places]))
        return out.view_as(x)


class ByNumpy(Routed):
    """Counts in numpy, and rows taken out by slices."""

    def forward(self, x: Tensor) -> Tensor:
        flat, chosen = self.chosen(x)
        order = chosen.argsort(stable=True)
        ends = chosen.cpu().bincount(minlength=4).cumsum(0).numpy()
        starts = [0, *ends[:-1]]
        rows = flat[order]
        parts = [
            self.expert(i, rows[int(a) : int(b)]) for i, (a, b) in enumerate(zip(starts, ends, strict=True))
        ]
        return torch.cat(parts)[order.argsort()].view_as(x)


class Repeated(Routed):
    """Every token as often as its expert's number says, summed up again."""

    def forward(self, x: Tensor) -> Tensor:
        flat, chosen = self.chosen(x)
        times = chosen + 1
        many = flat.repeat_interleave(times, dim=0)
        owner = torch.arange(len(flat), device=x.device).repeat_interleave(times)
        out = torch.zeros_like(flat).index_add(0, owner, self.expert(0, many))
        return (out + self.expert(1, flat) + self.expert(2, flat) + self.expert(3, flat)).view_as(x)


@pytest.mark.parametrize("way", [BySizes, ByMask, ByUnique, ByNumpy, Repeated])
def test_experts_in_a_list(way: type[Routed]) -> None:
    class Model(models.OddModel):
        mlp = way

    plan = models.plan_of(Model, 2, repeats=2)
    entries = parameter_plans(plan)
    experts = {n: e for n, e in entries.items() if ".chewer." in n and "router" not in n and len(e.dims) > 1}
    assert len(experts) == 16
    assert all(any(axes_of(d) for d in e.dims) for e in experts.values()), {
        n: e.reason for n, e in experts.items()
    }
    assert reductions(plan, "chewer") == ["output"]
    assert any(n.startswith("guessed: stack.*.chewer: ") for n in plan.notes)
