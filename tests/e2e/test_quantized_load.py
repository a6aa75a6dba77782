"""Block-scaled float8 models in real processes: the logits of the model without blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_processes
from quantized_checkpoints import dense_config, experts_config, save_quantized
from shardconv_runtime.format import plan_json

import shardconv

IDS = [[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 3]]

KINDS: dict[str, tuple[Any, Any, Any]] = {
    "dense": (dense_config, transformers.Qwen3ForCausalLM, None),
    "experts": (experts_config, transformers.DeepseekV3ForCausalLM, None),
    "dequantized": (experts_config, transformers.DeepseekV3ForCausalLM, "bfloat16"),
}


def logits_of_rank(path: Path, plan: Path | None = None) -> torch.Tensor:
    """Runs on each rank."""
    import shardconv_runtime

    model = shardconv_runtime.load(path, plan=plan, dtype="float32", dequantize=True)
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor(IDS)).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    config, cls, dtype = KINDS[kind]
    save_quantized(config(), cls, tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 2, dtype=dtype, check=False)
    unsharded = cls.from_pretrained(tmp_path / "model-plain", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = unsharded(torch.tensor(IDS)).logits
    for found in run_processes(2, logits_of_rank, tmp_path / "out"):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("has_blocks", [True, False])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_so_they_are_without_a_conversion(kind: str, has_blocks: bool, tmp_path: Path) -> None:
    """By a plan with the blocks, and by one that was made from the config alone."""
    config, cls, _ = KINDS[kind]
    save_quantized(config(), cls, tmp_path / "model")
    if has_blocks:
        shardconv.convert(tmp_path / "model", tmp_path / "plan.json", 2)
    else:
        plan_json.write(shardconv.plan(tmp_path / "model", 2), tmp_path / "plan.json")
    unsharded = cls.from_pretrained(tmp_path / "model-plain", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = unsharded(torch.tensor(IDS)).logits
    for found in run_processes(2, logits_of_rank, tmp_path / "model", tmp_path / "plan.json"):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def packed_of_rank(path: Path) -> tuple[torch.Tensor, bool]:
    """Without a conversion and without a plan."""
    import shardconv_runtime
    from shardconv_runtime.loaded import loaded

    model = shardconv_runtime.load(path, dtype="float32", dequantize=True)
    has_packings = any(entry.packing is not None for entry in loaded(model).plan.parameters)
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits, has_packings


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_plan_that_load_makes_keeps_the_weights_packed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCONV_CACHE", str(tmp_path / "cache"))
    config, cls, _ = KINDS[kind]
    save_quantized(config(), cls, tmp_path / "model")
    unsharded = cls.from_pretrained(tmp_path / "model-plain", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = unsharded(torch.tensor(IDS)).logits
    for found, has_packings in run_processes(2, packed_of_rank, tmp_path / "model"):
        assert has_packings
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
