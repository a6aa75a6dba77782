"""Grouped products of sharded experts in another dtype than planned in: kernels read 16 bytes of a row."""

from __future__ import annotations

from pathlib import Path

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import CONFIGS, save
from distributed import run_processes
from shardconv_runtime.format.plan import local_shape, parameter_plans
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 92, 65, 35]])


def logits_of_rank(path: Path) -> tuple[Tensor, str]:
    model = shardconv_runtime.load(path, dtype="bfloat16")
    with torch.no_grad():
        return model(IDS).logits.float(), model.config._experts_implementation


@pytest.mark.parametrize("tp", [2, 3])
def test_shares_of_rows_that_no_kernel_takes(tp: int, tmp_path: Path) -> None:
    """40 rows: shares of 20 would do in float32, and not in bfloat16."""
    sizes = {**CONFIGS["qwen3_moe"], "moe_intermediate_size": 40, "pad_token_id": 0}
    config = transformers.Qwen3MoeConfig(**sizes)
    source = save(
        transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32), tmp_path / "model"
    )
    plan = shardconv.convert(source, tmp_path / "out", tp, check=False)
    entry = next(e for name, e in parameter_plans(plan).items() if name.endswith("experts.down_proj"))
    widths = [local_shape(entry, plan.mesh, rank)[-1] for rank in range(tp)]
    assert sum(widths) == 40
    assert all(width % 8 == 0 for width in widths)
    full = transformers.Qwen3MoeForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = full(IDS).logits.float()
    for logits, implementation in run_processes(tp, logits_of_rank, tmp_path / "out"):
        assert implementation == "grouped_mm"
        torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
