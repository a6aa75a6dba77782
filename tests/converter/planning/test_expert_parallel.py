"""Whole experts on each rank: found by structure, proven by numbers, refused where neither helps.

``solve_plan`` simulates every rank in float64 and raises where the numbers differ, so that a plan which
comes back is right.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from made_inputs import make_inputs
from models import OddConfig, OddModel, spec
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import PlanError, SolveError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.plan import ModulePlan, Plan, global_shape, module_plans, parameter_plans
from torch import Tensor, nn

from shardconv.arguments import SolveOptions
from shardconv.dim_analysis.composite_modules import EXPERTS, find_experts
from shardconv.dim_analysis.rules import RULES
from shardconv.passes import solve_plan
from shardconv.planning.expert_parallel import isolate_experts
from shardconv.planning.solution import inference_only
from shardconv.reporting.report import report
from shardconv.simulation.expert_sums import NotProven, prove_experts
from shardconv.tracing.fold import fold
from shardconv.tracing.tape import Tape
from shardconv.tracing.trace import trace

_SIZES = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
    "deepseek_v3": {**_LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8},
    "llama4_text": {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 48},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8},
    },
}
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
TYPES = (
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "deepseek_v3",
    "gpt_oss",
    "olmoe",
    "granitemoe",
    "dbrx",
    "llama4_text",
    "phimoe",
)
LIKE_MIXTRAL = ("qwen3_moe", "olmoe", "granitemoe", "phimoe")
CASES = [
    *(
        (model_type, (2, 3, 4)[i % 3], 4)
        for i, model_type in enumerate(TYPES)
        if model_type not in LIKE_MIXTRAL
    ),
    ("mixtral", 3, 5),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            *((model_type, 3, 4) for model_type in LIKE_MIXTRAL),
            *((model_type, 2, 3) for model_type in ("mixtral", "gpt_oss", "llama4_text")),
            *((model_type, 4, 6) for model_type in ("mixtral", "gpt_oss", "llama4_text")),
            *((model_type, 3, 5) for model_type in ("gpt_oss", "llama4_text")),
        )
    ),
]
"""Type, ranks, experts; the shares are uneven on three ranks. Tests below look at the same plans."""


def published(model_type: str, num_experts: int) -> ModelSpec:
    """A tiny model of a type that transformers has."""
    kind = transformers.CONFIG_MAPPING[model_type]
    wanted = {**_SIZES, **dict.fromkeys(_COUNTS, num_experts), **_OWN.get(model_type, {})}
    if model_type == "dbrx":
        wanted["ffn_config"] = {
            "ffn_hidden_size": 24,
            "hidden_size": 32,
            "moe_num_experts": num_experts,
            "moe_top_k": 2,
        }
        wanted["attn_config"] = transformers.models.dbrx.configuration_dbrx.DbrxAttentionConfig(
            **wanted["attn_config"]
        )
        config = kind(
            **{k: v for k, v in wanted.items() if k in _OWN["dbrx"] or k in ("vocab_size", "ffn_config")}
        )
    else:
        known = kind().to_dict()
        config = kind(**{k: v for k, v in wanted.items() if k in known or k in _OWN.get(model_type, {})})
    model_class = transformers.AutoModelForCausalLM._model_mapping[kind]
    return ModelSpec(name=model_type, config=config, model_class=model_class, dtype="float32")


def stacks(plan: Plan, num_experts: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Mesh axes of each dim of the parameters inside of modules of experts."""
    owners = tuple(n + "." for n, m in module_plans(plan).items() if m.category == "experts")
    found = {n: e for n, e in parameter_plans(plan).items() if n.startswith(owners)}
    assert all(global_shape(e)[0] % num_experts == 0 for e in found.values())
    return {n: tuple(tuple(sorted(axes_of(d))) for d in e.dims) for n, e in found.items()}


def collectives(plan: Plan) -> Counter[str]:
    """Those of one forward pass, by kind; not counting embeddings and the head."""
    layers = [m for n, m in module_plans(plan).items() if any(part.isdigit() for part in n.split("."))]
    steps = [s.op for m in layers for s in (*m.inputs, *m.outputs)]
    return Counter(op for op in steps if op in ("all_reduce", "all_gather"))


@pytest.mark.parametrize(("model_type", "tp", "num_experts"), CASES)
def test_published_types(model_type: str, tp: int, num_experts: int) -> None:
    plan = solve_plan(published(model_type, num_experts), SolveOptions(tp, experts="ep"))
    assert plan.experts == "ep"
    laid_out = stacks(plan, num_experts)
    assert len(laid_out) >= 2
    assert {dims[0] for dims in laid_out.values()} == {(0,)}
    assert not any(axes for dims in laid_out.values() for axes in dims[1:])
    assert plan.mesh == (tp,)
    if model_type != "deepseek_v3":  # the latent attention gathers
        assert collectives(plan) == {"all_reduce": 4}, "one for attention and one for all experts, twice"
    assert plan_json.loads(plan_json.dumps(plan)) == plan


def test_the_number_of_collectives_is_that_of_the_default() -> None:
    model = published("deepseek_v3", 4)
    assert collectives(solve_plan(model, SolveOptions(2, experts="ep"))) == collectives(
        solve_plan(model, SolveOptions(2, check=False))
    )


def test_work_on_other_ranks_tokens_is_left_out_where_the_module_can() -> None:
    """Ids past the end, for modules that drop them in every way that they may be run; else row 0."""
    (cheap,) = _experts(solve_plan(published("mixtral", 5), SolveOptions(3, experts="ep")))
    assert [(s.port, s.op) for s in cheap.inputs] == [
        ("input.top_k_index", "local_rows_or_end"),
        ("input.top_k_weights", "zero_out_of_shard"),
    ]
    assert cheap.flags == ("_is_expert_parallel",)
    assert [(e.attribute, e.value, e.local) for e in cheap.overrides] == [("num_experts", 5, (2, 2, 1))]
    (plain,) = _experts(solve_plan(published("gpt_oss", 4), SolveOptions(3, experts="ep")))
    assert [s.op for s in plain.inputs] == ["local_rows", "zero_out_of_shard"]
    assert not plain.flags


def _experts(plan: Plan) -> list[ModulePlan]:
    """The modules of experts, with the steps of the forward pass."""
    return [m for m in inference_only(plan).modules if m.category == "experts"]


def test_shared_experts_join_the_reduction() -> None:
    plan = solve_plan(published("qwen2_moe", 4), SolveOptions(4, experts="ep"))
    reducing = [n for n, m in module_plans(plan).items() if any(s.op == "all_reduce" for s in m.outputs)]
    assert "model.layers.0.mlp" in reducing
    assert not any("expert" in name for name in reducing)


def test_more_ranks_than_experts() -> None:
    plan = solve_plan(published("mixtral", 4), SolveOptions(8, experts="ep"))
    assert plan.mesh == (4, 2)
    assert {dims[0] for dims in stacks(plan, 4).values()} == {(0,)}
    assert "4 experts on 8 ranks: 2 ranks hold each" in plan.notes


def test_experts_that_cannot_be_distributed() -> None:
    with pytest.raises(
        SolveError, match=r"the 2 experts of model\.layers\.0\.mlp\.experts .* over 3 ranks; use --exp"
    ):
        solve_plan(published("mixtral", 2), SolveOptions(3, experts="ep"))


def test_one_rank() -> None:
    plan = solve_plan(published("mixtral", 4), SolveOptions(1, experts="ep"))
    assert plan.experts == "ep"
    assert not plan.modules


def test_the_report_says_it() -> None:
    model = published("mixtral", 4)
    text = report(solve_plan(model, SolveOptions(2, experts="ep")))
    assert "experts   model.layers.{0,1}.mlp.experts" in text
    assert "expert parallel" in text
    assert "num_experts 4 → 2" in text
    assert "expert parallel" not in report(solve_plan(model, SolveOptions(2, check=False)))


# Modules of our own making -----------------------------------------------------------------------------


class Guild(nn.Module):
    """Experts whose weights come first, whose biases are stacked too, and whose count has an odd name."""

    ids_dtype = torch.int64

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.masters = 5
        self.width = config.width
        self.sword = nn.Parameter(torch.empty(5, config.width, 24))
        self.shield = nn.Parameter(torch.empty(5, 24))
        self.bow = nn.Parameter(torch.empty(5, 24, config.width))

    def forward(self, gold: Tensor, quest: Tensor, who: Tensor) -> Tensor:
        out = torch.zeros_like(quest)
        for one in range(self.masters):
            share = (gold * (who == one)).sum(-1, keepdim=True)
            out = out + share * self.duel(quest, one)
        return out

    def duel(self, x: Tensor, one: int) -> Tensor:
        return torch.tanh(x @ self.sword[one] + self.shield[one]) @ self.bow[one]


class Entangled(Guild):
    """Not a sum over the experts: the sum goes through a nonlinear function."""

    def forward(self, gold: Tensor, quest: Tensor, who: Tensor) -> Tensor:
        return torch.tanh(super().forward(gold, quest, who))


class Idle(Guild):
    """Ids beyond the stacked matrices mean that the token stays as it is."""

    def forward(self, gold: Tensor, quest: Tensor, who: Tensor) -> Tensor:
        idle = (gold * (who >= self.masters)).sum(-1, keepdim=True)
        return super().forward(gold, quest, who) + idle * quest


class Leaking(Guild):
    """An inner value is read by the module around it."""

    def forward(self, gold: Tensor, quest: Tensor, who: Tensor) -> Tensor:
        self.secret = quest * 2
        return super().forward(gold, quest, who)


class Town(nn.Module):
    """A router, and the guild that it calls by keywords and positions."""

    guild_class: type[nn.Module] = Guild
    choices = 2

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.mayor = nn.Linear(config.width, 5)
        self.guild = self.guild_class(config)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        gold, who = self.mayor(flat).softmax(-1).topk(self.choices, -1)
        return self.guild(gold, who=who.to(torch.int64), quest=flat).view(x.shape)


class OneEach(Town):
    """Each token has one expert; ids ``[T]``, weights ``[T, 1]``."""

    class Solo(Guild):
        def forward(self, gold: Tensor, quest: Tensor, who: Tensor) -> Tensor:
            return super().forward(gold, quest, who.unsqueeze(-1))

    guild_class = Solo

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        gold, who = self.mayor(flat).softmax(-1).max(-1)
        return self.guild(gold.unsqueeze(-1), flat, who).view(x.shape)


class Mayor(nn.Linear):
    """Weighs the experts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class Everyone(nn.Module):
    """No ids: a dense weight for each token and expert, and one batched product for all."""

    mayor_class: type[nn.Linear] = Mayor

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.mayor = self.mayor_class(config.width, 5)
        self.hall = Hall(config)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = self.vote(self.mayor(flat))
        each = flat.unsqueeze(0).expand(scores.shape[-1], -1, -1)
        return (self.hall(each) * scores.t().unsqueeze(-1)).sum(0).view(x.shape)

    def vote(self, scores: Tensor) -> Tensor:
        return scores


class Hurried(Everyone):
    """The softmax is in no module of its own: its result cannot be sharded before it is used."""

    mayor_class = nn.Linear

    def vote(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class Hall(nn.Module):
    """Stacked matrices, one for each slice of the input ``[E, T, H]``."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(5, config.width, 24))
        self.down = nn.Parameter(torch.empty(5, 24, config.width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.up)), self.down)


class Heads(nn.Module):
    """One matrix for each head, whose results lie side by side: no experts."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.empty(8, config.width // 8, config.width // 8))
        self.mix = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        heads = x.reshape(b * s, 8, w // 8).transpose(0, 1)
        return self.mix(torch.bmm(heads, self.turn).transpose(0, 1).reshape(b, s, w))


def model_with(block: type[nn.Module], guild: type[nn.Module] | None = None) -> type[OddModel]:
    """A model whose feed-forward is ``block``, around ``guild``."""
    kind = type("Block", (block,), {"guild_class": guild} if guild else {})
    return type("TownModel", (OddModel,), {"mlp": kind})


def solved(block: type[nn.Module], guild: type[nn.Module] | None = None, tp: int = 2, **sizes: int) -> Plan:
    """The plan of such a model, with whole experts on each rank."""
    return solve_plan(spec(model_with(block, guild), **sizes), SolveOptions(tp, experts="ep"))


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 3, 5])
@pytest.mark.parametrize("block", [Town, OneEach, Everyone])
def test_signatures(block: type[nn.Module], tp: int) -> None:
    plan = solved(block, tp=tp)
    laid_out = stacks(plan, 5)
    assert {dims[0] for dims in laid_out.values()} == {(0,)}
    assert not any(axes for dims in laid_out.values() for axes in dims[1:])
    assert len(laid_out) == (4 if block is Everyone else 6)


def test_the_override_is_found_among_equal_ints() -> None:
    """The width has the value of the count, but is none."""

    class Confusing(Guild):
        def __init__(self, config: OddConfig) -> None:
            super().__init__(config)
            self.fingers = 5

        def forward(self, gold: Tensor, quest: Tensor, who: Tensor) -> Tensor:
            return super().forward(gold, quest, who) * self.fingers

    (entry,) = _experts(solved(Town, Confusing))
    assert [(e.attribute, e.value, e.local) for e in entry.overrides] == [("masters", 5, (3, 2))]


@pytest.mark.parametrize(
    ("guild", "problem"),
    [
        (Entangled, r"differs by .* of its largest output"),
        (Idle, "ids beyond its stacked parameters"),
    ],
)
def test_what_is_no_sum_over_experts_is_refused(guild: type[nn.Module], problem: str) -> None:
    with pytest.raises(SolveError, match=rf"stack\.0\..*guild could not be proven .*{problem}.*--experts tp"):
        solved(Town, guild)


def test_stacks_whose_weights_are_not_at_a_mark_are_refused() -> None:
    with pytest.raises(
        SolveError, match=r"hall holds stacked matrices \(.*\) that are used in a way that cannot"
    ):
        solved(Hurried)


def test_experts_in_other_modules_are_refused() -> None:
    """Single matrices are taken out of a stack by a module that is not called like experts."""

    class Alone(Guild):
        def forward(self, quest: Tensor) -> Tensor:  # type: ignore[override]
            return self.duel(quest, 0) + self.duel(quest, 3)

    class Village(nn.Module):
        def __init__(self, config: OddConfig) -> None:
            super().__init__()
            self.guild = Alone(config)

        def forward(self, x: Tensor) -> Tensor:
            return self.guild(x)

    with pytest.raises(SolveError, match=r"guild holds stacked matrices \(.*sword\)"):
        solved(Village)


@pytest.mark.parametrize("block", [None, Heads])
def test_no_experts(block: type[nn.Module] | None) -> None:
    with pytest.raises(SolveError, match="the model has no stacks of experts; use --experts tp"):
        solve_plan(spec(model_with(block) if block else OddModel), SolveOptions(2, experts="ep"))


# The stages --------------------------------------------------------------------------------------------


def traced(block: type[nn.Module], guild: type[nn.Module] | None = None) -> tuple[nn.Module, Tape]:
    """Such a model on meta, and its tape."""
    model_spec = spec(model_with(block, guild))
    with torch.device("meta"):
        model = model_spec.model_class(model_spec.config).eval()
    inputs = make_inputs(model)
    return model, trace(model, inputs.tensors, RULES, inputs.options)


def test_a_candidate_is_told_by_its_inputs() -> None:
    model, tape = traced(Town)
    first, *_ = find_experts(tape)
    assert first.fqn.endswith("guild")
    assert (first.x, first.ids, first.weights) == ("input.quest", "input.who", "input.gold")
    assert [tape.tensors[t].name.rpartition(".")[2] for t in first.parameters] == ["sword", "shield", "bow"]
    split = prove_experts(model.get_submodule(first.fqn), first, tape)
    assert split.num_experts == 5
    assert split.overrides == (("", "masters"),)


def test_no_candidate_whose_inner_values_are_read_outside() -> None:
    class Nosy(Town):
        guild_class = Leaking

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out + self.guild.secret.view(x.shape)

    assert not find_experts(traced(Nosy)[1])


def test_an_isolated_module_is_one_operator() -> None:
    model, tape = traced(Town)
    folded = isolate_experts(fold(tape), model)
    names = [getattr(e, "name", "") for e in folded.tape.events]
    sites = [n for n in names if n.startswith(EXPERTS)]
    assert sites
    inside = {c.call for c in find_experts(fold(tape).tape)}
    kept = [e for e in folded.tape.events if e.call in inside and hasattr(e, "name")]
    assert [e.base for e in kept] == [EXPERTS] * len(sites)
    assert folded.tape.sources() == tape.sources()


def test_a_wide_module_is_proven_on_a_narrow_copy() -> None:
    """Whatever its width: parameters of 48 million elements, and attributes that views read."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.inner, self.outer = 8, 1536, 2048
            self.flat = nn.Parameter(torch.empty(8 * 1536, 2048))
            self.back = nn.Parameter(torch.empty(8, 1536, 2048))

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            up = self.flat.view(-1, self.inner, self.outer)[ids]
            y = F.silu(torch.einsum("tkio,to->tki", up, x))
            return torch.einsum("tki,tkio,tk->to", y, self.back[ids], weights)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = Wide()

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return self.wide(x, ids, weights)

    with torch.device("meta"):
        model = Around()
    inputs = {
        "x": torch.zeros(7, 2048),
        "ids": torch.zeros(7, 2, dtype=torch.int64),
        "weights": torch.ones(7, 2),
    }
    tape = trace(model, inputs, RULES)
    (candidate,) = find_experts(tape)
    split = prove_experts(model.wide, candidate, tape)
    assert (split.num_experts, split.past_end, split.flags, split.overrides) == (8, False, (), ())


def test_every_way_to_run_experts_is_proven() -> None:
    """A module that is right in two ways and wrong in a third is not proven."""
    model, tape = _published_tape("mixtral")
    (candidate, *_) = find_experts(tape)
    module = model.get_submodule(candidate.fqn)
    assert prove_experts(module, candidate, tape).past_end

    class Wrong(type(module)):  # type: ignore[misc]
        @functools.wraps(type(module).forward)
        def forward(self, *args: Tensor) -> Tensor:
            out: Tensor = super().forward(*args)
            return torch.tanh(out) if self.config._experts_implementation == "batched_mm" else out

    module.__class__ = Wrong
    with pytest.raises(NotProven, match="differs by"):
        prove_experts(module, candidate, tape)


def _published_tape(model_type: str) -> tuple[nn.Module, Tape]:
    model_spec = published(model_type, 4)
    with torch.device("meta"):
        model = model_spec.model_class(model_spec.config).eval()
    inputs = make_inputs(model)
    return model, trace(model, inputs.tensors, RULES, inputs.options)


def test_a_plan_that_says_ep_has_experts() -> None:
    plan = solve_plan(published("mixtral", 4), SolveOptions(2, experts="ep"))
    text = plan_json.dumps(plan)
    with pytest.raises(PlanError, match="experts: expected one of tp, ep"):
        plan_json.loads(text.replace('"experts": "ep"', '"experts": "both"'))
    with pytest.raises(PlanError, match='no module has the category "experts"'):
        plan_json.loads(
            text.replace('"category": "experts"', '"category": "boundary"').replace(
                ', "flags": ["_is_expert_parallel"]', ""
            )
        )
