"""Whole experts on each rank, in real processes, from a checkpoint on disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import CONFIGS, LAYERS, save, save_causal
from distributed import run_processes
from measured_models import Measured, measure_rank, measure_unsharded
from shardconv_runtime.files.manifest import PLAN_NAME
from shardconv_runtime.format import plan_json
from torch import Tensor

import shardconv
from shardconv import cli


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert want.isfinite().all()
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize(("model_type", "tp"), [("mixtral", 3), ("qwen3_moe", 2)])
def test_same_logits_and_tokens(model_type: str, tp: int, tmp_path: Path) -> None:
    """By a loop over the experts in float64, by the grouped product in float32."""
    path = save_causal(model_type, tmp_path / model_type)
    assert_same(path, tmp_path / "out", tp, measure_unsharded(path, True))


def test_shared_experts_and_a_cache(tmp_path: Path) -> None:
    sizes = {**CONFIGS["qwen3_moe"], "shared_expert_intermediate_size": 32}
    config = transformers.CONFIG_MAPPING["qwen2_moe"](**{k: v for k, v in sizes.items() if k != "head_dim"})
    config.pad_token_id = 0
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    path = save(model, tmp_path / "model")
    assert_same(path, tmp_path / "out", 2, measure_unsharded(path, True))


def assert_same(path: Path, out: Path, tp: int, unsharded: Measured) -> None:
    """Convert, run, compare; count the collectives and what each rank holds."""
    plan = shardconv.convert(path, out, tp=tp, experts="ep", check=False)
    assert plan.experts == "ep"
    for rank in (ranks := run_processes(tp, measure_rank, out, True)):
        assert error(rank.double, unsharded.double) < 1e-9
        assert error(rank.exact, unsharded.exact) < 1e-9
        assert error(rank.single, unsharded.single) < 1e-4
        assert torch.equal(rank.greedy, unsharded.greedy)
        assert torch.equal(rank.sampled, unsharded.sampled)
        assert rank.collectives == Counter(all_reduce=1 + 2 * LAYERS, all_gather_into_tensor=1)
    experts = [name for name in unsharded.sizes if ".experts." in name]
    assert experts
    assert all(sum(rank.sizes[name] for rank in ranks) == unsharded.sizes[name] for name in experts)


def implementations_of_rank(path: Path, dtype: str) -> list[str]:
    model = shardconv_runtime.load(path, dtype=dtype)
    found = []
    for chosen in ("eager", "batched_mm", {"": "eager"}, {"": "batched_mm"}):
        model.set_experts_implementation(chosen)
        found.append(model.model.layers[0].mlp.experts.config._experts_implementation)
    return found


def test_no_rank_multiplies_tokens_of_others_in_decoding(tmp_path: Path) -> None:
    """On a GPU transformers would choose batched products there."""
    path = save_causal("qwen3_moe", tmp_path / "model")
    shardconv.convert(path, tmp_path / "out", tp=2, experts="ep", check=False)
    shardconv.convert(path, tmp_path / "tp", tp=2, check=False)
    grouped, batched = ["eager", "grouped_mm"] * 2, ["eager", "batched_mm"] * 2
    for directory, dtype, expected in (
        ("out", "bfloat16", grouped),
        ("out", "float32", batched),
        ("tp", "bfloat16", batched),
    ):
        found = run_processes(2, implementations_of_rank, tmp_path / directory, dtype)
        assert found == [expected] * 2


def test_the_command_and_planning_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = save_causal("mixtral", tmp_path / "model"), tmp_path / "out"
    assert cli.run(["convert", str(path), str(out), "--tp", "2", "--experts", "ep"]) == 0
    assert cli.run(["inspect", str(out)]) == 0
    assert "expert parallel: experts are distributed, not sharded" in capsys.readouterr().out
    before = plan_json.read(out / PLAN_NAME)
    assert cli.run(["reshard", str(out), "--in-place", "--no-check"]) == 0
    assert plan_json.read(out / PLAN_NAME) == replace(before, proven_arguments=())  # nothing was proven
    assert before.experts == "ep"


def test_a_model_without_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_causal("llama", tmp_path / "model")
    assert cli.run(["convert", str(path), str(tmp_path / "out"), "--tp", "2", "--experts", "ep"]) == 5
    assert "the model has no stacks of experts; use --experts tp" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
