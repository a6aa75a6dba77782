"""The report says what is in the plan, in at most 100 columns, fast."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.plan import FusedPlan, ModulePlan, NormInfo, ParameterPlan, Plan
from small_models import hand_plan, small_config

from shardconv.reporting.report import report
from shardconv.reporting.summary import human_bytes, human_count, summarize


@pytest.fixture(scope="module")
def large() -> Plan:
    """A plan for 126 layers and 405 billion parameters."""
    config = small_config(
        num_hidden_layers=126,
        hidden_size=16384,
        intermediate_size=53248,
        num_attention_heads=128,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    return hand_plan(config, 8, "bfloat16")


def test_the_numbers_of_a_known_model(large: Plan) -> None:
    summary = summarize(large)
    assert summary.total_bytes == 2 * 405_853_388_800
    replicated = 2 * 16384 * (2 * 126 + 1)
    assert summary.sharded_bytes == summary.total_bytes - replicated
    assert set(summary.rank_bytes) == {summary.sharded_bytes // 8 + replicated}
    assert sum(group.num_bytes for group in summary.replicated) == replicated
    assert sum(kind.rank_bytes for kind in summary.kinds) == summary.sharded_bytes // 8
    reduced = [c for c in summary.collectives if c.op == "all_reduce"]
    assert sum(c.count for c in reduced) == 1 + 2 * 126
    assert sum(c.token_bytes for c in reduced) == 253 * 16384 * 2
    (gathered,) = (c for c in summary.collectives if c.op == "all_gather")
    assert (gathered.count, gathered.token_bytes) == (1, 128256 * 2)


def test_what_a_person_reads(large: Plan) -> None:
    lines = report(large).splitlines()
    assert lines[:2] == [
        "LlamaForCausalLM",
        f"  405.9 B parameters, bfloat16 · tp 8, mesh 8 · torch {large.code.torch}, "
        f"transformers {large.code.transformers}",
    ]
    words = [" ".join(line.split()) for line in lines]
    for expected in (
        "row model.layers.{0..125}.mlp.down_proj 126 27.5 GB",
        "weight [16384, 53248] → [16384, 6656] [16384, 53248@0]",
        "overrides num_heads 4 → 1",
        "REPLICATED 8.3 MB on every rank, less than 0.01% of the model",
        "its dim is normalised, and sharding it would cost more than it saves",
        "model.norm.weight [16384] 32.8 kB",
        "all_gather lm_head output 1 256.5 kB 525.3 MB",
        "each rank 101.5 GB (12.50% of the model)",
        "- this plan was written by hand",
    ):
        assert expected in words
    assert max(map(len, lines)) <= 100


def test_it_is_fast(large: Plan) -> None:
    start = time.perf_counter()
    report(large)
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_uneven_and_small_plans_fit_the_width(tp: int) -> None:
    plan = hand_plan(small_config(), tp)
    text = report(plan, num_tokens=10)
    assert max(map(len, text.splitlines())) <= 100
    assert ("REPLICATED" in text) == (tp > 1)
    assert "10 tokens" in text
    if tp == 3:
        assert "[101, 32] → [34, 32] … [33, 32]" in text
        assert re.search(r"each rank +\S+ kB to \S+ kB", text)


def test_fused_products(large: Plan) -> None:
    members = tuple((f"model.layers.{{0..125}}.self_attn.{name}_proj",) for name in "qkv")
    lines = report(dataclasses.replace(large, fused=(FusedPlan(members),))).splitlines()
    assert "FUSED       layers with the same input (inference only)" in lines
    assert "  model.layers.{0..125}.self_attn: q_proj + k_proj + v_proj (378 products become 126)" in lines
    assert not any(line.startswith("FUSED") for line in report(large).splitlines())


def test_norms_partials_and_long_names() -> None:
    plan = hand_plan(small_config(), 2)
    long = ".".join(["a_module_with_a_long_name"] * 5)
    norm = NormInfo("layer", 1e-5, 32, (0,), weight="weight", bias="bias")
    plan = dataclasses.replace(
        plan,
        parameters=(
            *plan.parameters,
            ParameterPlan((f"{long}.weight",), (Leaf(32, (0,)),), "float32"),
            ParameterPlan((f"{long}.bias",), (Leaf(32),), "float32", partial=(0,)),
            ParameterPlan((f"{long}.scale",), (Leaf(32),), "float32"),
        ),
        modules=(*plan.modules, ModulePlan((long,), "norm", norm=norm)),
    )
    (statistic,) = (c for c in summarize(plan).collectives if c.port == "statistic")
    assert (statistic.op, statistic.count, statistic.token_bytes) == ("all_reduce", 1, 8)
    text = report(plan)
    assert "partial over mesh axis 0" in text
    assert "reason not recorded" in text
    for line in text.splitlines():
        assert len(line) <= 100 or long in line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_950, "1.0 MB"),
        (16_777_216, "16.8 MB"),
        (2e18, "2000.0 PB"),
    ],
)
def test_bytes(value: float, text: str) -> None:
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (22_000, "22.0 k"), (671e9, "671.0 B"), (1.6e12, "1.6 T")]
)
def test_counts(value: float, text: str) -> None:
    assert human_count(value) == text
