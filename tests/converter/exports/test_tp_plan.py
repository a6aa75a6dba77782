"""A plan as a transformers ``tp_plan``: the rules that models come with, or a refusal with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from boundaries import boundary
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.plan import (
    AttributeOverride,
    ModulePlan,
    PackedDim,
    PackedTensor,
    Packing,
    Plan,
)
from torch import nn
from tp_plan_cases import (
    HIDDEN,
    MLP,
    built,
    change_modules,
    change_parameters,
    config,
    on_two_axes,
    solved,
    whole,
    with_gathered_mlp,
    with_whole_mlp,
)
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter

from shardconv import cli
from shardconv.exports.tp_plan import (
    ALL_PARALLEL_STYLES,
    _keeps_shards,
    skeleton,
    to_json,
    tp_plan,
)
from shardconv.exports.tp_styles import EvenShards, Inexpressible, PlannedModule

ENDS = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
"""Rules around the layers; configs have those of the layers."""


def rules_of(model_type: str, tp: int = 2, **changes: Any) -> dict[str, str]:
    return tp_plan(solved(model_type, tp, **changes), built(model_type, **changes))


def refusal(plan: Plan, model: nn.Module) -> str:
    with pytest.raises(PlanError) as error:
        tp_plan(plan, model)
    assert "\n" not in str(error.value)
    return str(error.value)


class TestRules:
    """What is expressed."""

    @pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
    @pytest.mark.parametrize(
        "model_type", ["llama", pytest.param("mistral", marks=pytest.mark.slow), "qwen2", "qwen3", "gemma2"]
    )
    def test_dense_decoders_get_the_rules_that_they_come_with(self, model_type: str, tp: int) -> None:
        own = {f"model.{name}": style for name, style in config(model_type).base_model_tp_plan.items()}
        assert rules_of(model_type, tp) == own | ENDS

    @pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
    def test_experts_get_the_rules_that_they_come_with(self, model_type: str) -> None:
        own = {f"model.{name}": style for name, style in config(model_type).base_model_tp_plan.items()}
        dense = {name for name in own if name.startswith("model.layers.*.mlp.") and name.endswith("_proj")}
        dense -= {name for name in own if ".experts." in name}
        rules = rules_of(model_type)
        assert rules == {n: style for n, style in own.items() if n not in dense} | ENDS
        assert rules["model.layers.*.mlp.experts.gate_up_proj"] == "packed_colwise"

    def test_a_sum_after_several_modules(self) -> None:
        rules = rules_of("qwen2_moe")
        mlp = {n.removeprefix("model.layers.*.mlp"): s for n, s in rules.items() if ".mlp" in n}
        assert mlp == {
            "": "all_reduce",
            ".experts": "local_params",
            ".experts.gate_up_proj": "packed_colwise",
            ".experts.down_proj": "rowwise",
            ".shared_expert.gate_proj": "colwise",
            ".shared_expert.up_proj": "colwise",
            ".shared_expert.down_proj": "local_params",
            ".shared_expert.down_proj.weight": "rowwise",
        }

    def test_heads_that_are_fused_one_by_one(self) -> None:
        assert rules_of("gpt_neox")["gpt_neox.layers.*.attention.query_key_value"] == "colwise"

    def test_modules_that_only_the_class_would_shard_are_left_alone(self) -> None:
        rules = tp_plan(with_whole_mlp(solved("llama", 2)), built("llama"))
        mlp = {style for name, style in rules.items() if ".mlp." in name}
        assert mlp == {"replicate"}
        assert "model.layers.*.self_attn.q_proj" in rules

    def test_left_alone_in_versions_without_a_style_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        styles = set(ALL_PARALLEL_STYLES) - {"replicate"}
        monkeypatch.setattr("shardconv.exports.tp_plan.ALL_PARALLEL_STYLES", styles)
        rules = tp_plan(with_whole_mlp(solved("llama", 2)), built("llama"))
        assert rules["model.layers.*.mlp.up_proj"] == "replicated_with_grad_allreduce"

    def test_parameters_of_the_class_follow_their_module(self) -> None:
        """A rule of the class for a parameter would win over that of its module."""
        model = skeleton(config("llama"))
        model._tp_plan = {
            **model.tp_plan,
            "model.layers.*.mlp.up_proj.weight": "rowwise",
            "absent": "rowwise",
        }
        rules = tp_plan(solved("llama", 2), model)
        assert rules["model.layers.*.mlp.up_proj.weight"] == "colwise"
        assert "absent" not in rules

    def test_gathered_and_sliced(self) -> None:
        rules = tp_plan(with_gathered_mlp(solved("llama", 2)), built("llama"))
        assert rules["model.layers.*.mlp.up_proj"] == "colwise_gather_output"
        assert rules["model.layers.*.mlp.down_proj"] == "rowwise_split_input"

    def test_ranks_on_two_mesh_axes(self) -> None:
        assert tp_plan(on_two_axes(solved("llama", 4)), built("llama")) == rules_of("llama", 4)

    def test_ranks_in_another_order(self) -> None:
        assert "neither one block nor a block of each half (64@1.0)" in refusal(
            on_two_axes(solved("llama", 4), (1, 0)), built("llama")
        )

    def test_one_rank_needs_no_rule(self) -> None:
        assert rules_of("llama", 1) == {}

    def test_json(self) -> None:
        rules = rules_of("llama")
        assert json.loads(to_json(rules)) == rules
        assert to_json(rules).endswith('"\n}\n')


REFUSED: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    "uneven heads": ("llama", 3, {}, ("self_attn.q_proj: ", "uneven shards of weight", "(4@0*16)", "more")),
    "uneven vocabulary": ("llama", 2, {"vocab_size": 61}, ("model.embed_tokens: ", "uneven", "lm_head: ")),
    "few key/value heads": ("llama", 8, {}, ("k_proj: several ranks hold the same shard of weight (4@0*8)",)),
    "fused, unequal": ("phi3", 2, {}, ("must be 4 on a rank, and stays 8", "qkv_proj: the shards of weight")),
    "overrides": (
        "gpt2",
        2,
        {},
        ("transformer.h.*.attn: its split_size must be 32 on a rank, and stays 64",),
    ),
    "sharded norm": ("olmo2", 2, {}, ("q_norm: it normalizes a sharded dim",)),
    "deferred sum": ("cohere", 2, {}, ("no style is for a CohereLayerNorm with all_reduce at input",)),
    "partial bias of experts": ("gpt_oss", 2, {}, ("down_proj_bias has its values on one rank and zeros",)),
    "bare parameter": ("gpt_oss", 2, {}, ("self_attn: no style is for a GptOssAttention with sinks",)),
    "layers differ": (
        "qwen2_moe",
        2,
        {"dense_first": True},
        ("model.layers.*.mlp: one style is for all layers, and they need all_reduce or none",),
    ),
    "taken apart on load": (
        "hrm_text",
        2,
        {},
        ("q_proj: transformers takes a rank's shard of attn.gqkv_proj",),
    ),
    "whole experts": ("mixtral", 2, {"experts": "ep"}, ("--experts ep",)),
}


class TestRefusals:
    """What is not expressed, and why."""

    @pytest.mark.parametrize("case", REFUSED)
    def test_the_reason_is_given(self, case: str) -> None:
        model_type, tp, options, wanted = REFUSED[case]
        changes = {name: value for name, value in options.items() if name != "experts"}
        message = refusal(solved(model_type, tp, **options), built(model_type, **changes))
        for text in wanted:
            assert text in message
        assert len(message) < 900

    def test_a_style_that_the_installed_version_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "shardconv.exports.tp_plan.ALL_PARALLEL_STYLES", set(ALL_PARALLEL_STYLES) - {"local_params"}
        )
        assert 'mlp.experts: it needs the style "local_params"' in refusal(
            solved("qwen2_moe", 2), built("qwen2_moe")
        )

    def test_a_plan_of_another_model(self) -> None:
        assert "not for this model" in refusal(solved("llama", 2), built("qwen3"))
        assert "not for this model" in refusal(solved("llama", 2), built("llama", intermediate_size=2 * MLP))

    def test_quantized_weights(self) -> None:
        """transformers has modules of its own for them, which nobody planned."""
        stored = PackedTensor("*", "float8_e4m3fn", (PackedDim(0, 1), PackedDim(1, 1)))
        packing = Packing("fp8", (stored,))
        plan = change_parameters(solved("llama", 2), "up_proj.weight", lambda e: replace(e, packing=packing))
        assert "quantized weights" in refusal(plan, built("llama"))
        quantized = config("llama")
        settings = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
        quantized.quantization_config = settings
        for dtype in (None, "float32"):  # with a dtype, the plan is one of the dequantized weights
            with pytest.raises(PlanError, match=r"LlamaConfig: .* quantized weights"):
                skeleton(quantized, dtype=dtype)

    def test_a_plan_that_shards_nothing(self) -> None:
        plan = solved("llama", 2)
        plan = replace(plan, modules=(), parameters=tuple(map(whole, plan.parameters)))
        assert "shards nothing over 2 ranks" in refusal(plan, built("llama"))


def _reduced(*axes: int) -> Callable[[ModulePlan], ModulePlan]:
    return lambda m: replace(m, outputs=(boundary("output", "all_reduce", axes=axes),))


CHANGES: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a reduction among some": (
        lambda p: change_modules(on_two_axes(p), "o_proj", _reduced(0)),
        "only some of the ranks take part",
    ),
    "a matrix in two dims": (
        lambda p: change_parameters(
            on_two_axes(p),
            "down_proj.weight",
            lambda e: replace(e, dims=(Leaf(HIDDEN, (1,)), Leaf(MLP, (0,)))),
        ),
        "weight is sharded in 2 dims",
    ),
    "a gather in the middle": (
        lambda p: change_modules(
            p,
            "q_proj",
            lambda m: replace(
                m, outputs=(boundary("output", "all_gather", dim=-1, layout=Leaf(HIDDEN * 4, (0,))),)
            ),
        ),
        "the all_gather at output is of a dim that none of its parameters has",
    ),
    "a gathered input": (
        lambda p: change_modules(
            p,
            "up_proj",
            lambda m: replace(
                m, inputs=(boundary("input.input", "all_gather", dim=-1, layout=Leaf(MLP, (0,))),)
            ),
        ),
        "no style is for a Linear with weight sharded in dim -2; all_gather at input.input",
    ),
    "an override": (
        lambda p: change_modules(
            p, "q_proj", lambda m: replace(m, overrides=(AttributeOverride("size", 8, (3, 3, 1, 1)),))
        ),
        "its size must be 1 or 3 on a rank, and stays 8",
    ),
    "another port": (
        lambda p: change_modules(
            p, "o_proj", lambda m: replace(m, outputs=(boundary("output.0", "all_reduce", axes=(0,)),))
        ),
        "all_reduce at output.0",
    ),
    "a flag": (
        lambda p: change_modules(
            p,
            "o_proj",
            lambda m: replace(m, category="experts", flags=("x",)),
        ),
        "more than steps",
    ),
    "a matrix that is whole": (
        lambda p: change_parameters(p, "o_proj.weight", whole),
        "it computes with a sharded parameter of another module",
    ),
    "a sharded norm that the plan does not know of": (
        lambda p: change_parameters(p, "model.norm.weight", lambda e: replace(e, dims=(Leaf(HIDDEN, (0,)),))),
        "no style is for a LlamaRMSNorm with weight sharded in dim -1",
    ),
    "an unknown module": (
        lambda p: replace(p, modules=(*p.modules, ModulePlan(("model.other",), "column"))),
        "model.other: it is one module under two names",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_plans_are_refused(case: str) -> None:
    """Each of these differs from a plan that is expressible in one thing."""
    change, wanted = CHANGES[case]
    assert wanted in refusal(change(solved("llama", 4)), built("llama"))


class TestStyles:
    """Which style fits a module: parts of its parameters, and its steps."""

    reduce = (boundary("output", "all_reduce", axes=(0,)),)

    def styles(self, linear: nn.Module, category: str, **parts: EvenShards | None) -> tuple[str | None, Any]:
        outputs = self.reduce if category == "row" else ()
        return PlannedModule(linear, ModulePlan((), category, outputs=outputs), parts).styles()

    def test_a_bias_in_rows(self) -> None:
        linear = nn.Linear(8, 8)
        assert self.styles(linear, "column", weight=EvenShards(2), bias=EvenShards(1)) == ("colwise", {})
        with pytest.raises(Inexpressible):
            self.styles(linear, "row", weight=EvenShards(2), bias=None)

    def test_halves_have_no_style_for_a_bias(self) -> None:
        linear, halves = nn.Linear(8, 8), EvenShards(2, of_halves=True)
        assert self.styles(nn.Linear(8, 8, bias=False), "column", weight=halves) == ("packed_colwise", {})
        assert self.styles(linear, "column", weight=halves, bias=EvenShards(1)) == ("packed_colwise", {})
        with pytest.raises(Inexpressible, match="halves of dim -2"):
            self.styles(linear, "column", weight=halves, bias=EvenShards(1, of_halves=True))

    def test_a_bias_of_a_sum_is_added_once(self) -> None:
        """The module's own code would add it on every rank, before the sum."""
        halves = EvenShards(1, of_halves=True)
        plain = self.styles(nn.Linear(8, 8, bias=False), "row", weight=halves)
        assert plain == ("moe_tp_experts", {"weight": "packed_rowwise"})
        with pytest.raises(Inexpressible):
            self.styles(nn.Linear(8, 8), "row", weight=halves, bias=None)
        assert self.styles(nn.Linear(8, 8), "row", weight=EvenShards(1), bias=None) == ("rowwise", {})

    def test_other_classes_run_their_own_code(self) -> None:
        """The styles of linear layers know how these compute, and nothing of other classes."""
        other = nn.Module()
        other.register_parameter("weight", nn.Parameter(torch.zeros(8, 8)))
        assert self.styles(other, "column", weight=EvenShards(2)) == ("local_params", {"weight": "colwise"})
        assert self.styles(other, "row", weight=EvenShards(1)) == ("moe_tp_experts", {"weight": "rowwise"})

    def test_a_parameter_by_the_name_of_bias(self) -> None:
        """``rowwise`` keeps it whole, whatever its shape."""
        experts = nn.Module()
        experts.register_parameter("bias", nn.Parameter(torch.zeros(4, 8)))
        entry = ModulePlan((), "experts", outputs=self.reduce)
        with pytest.raises(Inexpressible):
            PlannedModule(experts, entry, {"bias": EvenShards(1)}).styles()
        assert PlannedModule(experts, entry, {"bias": EvenShards(2)}).styles()[1] == {"bias": "colwise"}


STACK, JOIN = MergeModulelist(dim=0), Concatenate(dim=1)


@pytest.mark.parametrize(
    ("num_sources", "operations", "part", "num_dims", "keeps"),
    [
        (1, [STACK], EvenShards(1), 3, True),
        (1, [STACK], EvenShards(2, of_halves=True), 3, False),
        (1, [STACK], EvenShards(3), 3, False),
        (2, [STACK, JOIN], EvenShards(2, of_halves=True), 3, True),
        (2, [STACK, JOIN], EvenShards(2), 3, False),
        (2, [STACK, JOIN], EvenShards(1), 3, True),
        (3, [STACK, JOIN], EvenShards(2, of_halves=True), 3, False),
        (2, [Concatenate(dim=0)], EvenShards(2, of_halves=True), 2, False),
        (2, [Concatenate(dim=-2)], EvenShards(2, of_halves=True), 2, False),
        (2, [Concatenate(dim=0)], EvenShards(1), 2, True),
        (1, [Chunk(dim=0)], EvenShards(1), 2, False),
    ],
)
def test_conversions_on_load(
    num_sources: int, operations: list[Any], part: EvenShards, num_dims: int, keeps: bool
) -> None:
    sources = [f"layers.*.w{i}.weight" for i in range(num_sources)]
    converter = WeightConverter(sources, ["layers.w"], operations)
    assert _keeps_shards(converter, part, num_dims) is keeps


class TestCommand:
    """``shardconv export --format tp_plan``."""

    def run(self, capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run([str(arg) for arg in ("export", *argv)])
        return code, *capsys.readouterr()

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        config("llama").save_pretrained(tmp_path / "model")
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
        return tmp_path / "model"

    def test_tp_plan(self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "rules.json"
        code, out, _ = self.run(capsys, model, "--tp", 2, "--format", "tp_plan", "-q")
        assert code == 0
        assert json.loads(out) == rules_of("llama")
        assert self.run(capsys, model, file, "--tp", 2, "--format", "tp_plan", "-q") == (0, "", "")
        assert file.read_text() == out

    def test_a_refusal_prints_and_writes_nothing(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "rules.json"
        code, out, err = self.run(capsys, model, file, "--tp", 3, "--format", "tp_plan", "-q")
        assert (code, out) == (5, "")
        assert err.startswith("error: a tp_plan cannot express this plan for 3 ranks: model.embed_tokens: ")
        assert err.count("\n") == 1
        assert not file.exists()
