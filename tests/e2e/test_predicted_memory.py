"""What a plan says of weights, cache and prefill, against the tensors of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime.format.measured import cache_bytes, prefill_bytes
from shardconv_runtime.format.plan import Plan
from small_models import save_random
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import shardconv
from shardconv.reporting.plan_lines import parts, weight_bytes
from shardconv.simulation.memory_run import tensors_of

pytestmark = pytest.mark.usefixtures("measured")

BATCH, LENGTH, STEPS = 2, 256, 2


def num_bytes(tensors: list[Tensor]) -> int:
    """Of the memory under tensors."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def measured(out: str) -> tuple[int, int, int]:
    """Bytes of a rank's weights, of its cache after some steps, and most bytes that torch had allocated."""
    model = shardconv_runtime.load(out)
    weights = num_bytes([*model.parameters(), *model.buffers()])
    ids = torch.randint(3, 100, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model(input_ids=ids[:, :5])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            outputs = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        for _ in range(STEPS):
            outputs = model(input_ids=ids[:, :1], past_key_values=outputs.past_key_values, use_cache=True)
    live = most = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return weights, num_bytes([t for _, t in tensors_of({"": outputs.past_key_values})]), most


def mixture(directory: Path, num_layers: int) -> Path:
    """A model of which a window ends the cache."""
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=4,
        sliding_window=24,
        vocab_size=101,
        tie_word_embeddings=False,
    )
    save_random(config, transformers.MixtralForCausalLM, directory)
    return directory


def require_predicted(plan: Plan, found: list[tuple[int, int, int]]) -> None:
    """What the ranks of a plan, of one stage or without any, were seen to need is what it says."""
    assert plan.memory is not None
    assert max(weights for weights, _, _ in found) == weight_bytes(plan)  # the vocabulary is uneven
    assert max(cache for _, cache, _ in found) == cache_bytes(plan.memory, BATCH, LENGTH + STEPS)
    expected = prefill_bytes(plan.memory, BATCH, LENGTH)
    live = min(most for _, _, most in found) - cache_bytes(plan.memory, BATCH, LENGTH)
    assert expected == pytest.approx(live, rel=0.25)  # gloo's threads keep a sum for a moment


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_mixture_with_windows(tmp_path: Path, tp: int) -> None:
    model = mixture(tmp_path / "model", 3)
    plan = shardconv.convert(model, tmp_path / "out", tp, check=False)
    require_predicted(plan, run_processes(tp, measured, str(tmp_path / "out")))


def test_each_stage_of_a_mixture(tmp_path: Path) -> None:
    model = mixture(tmp_path / "model", 5)
    plan = shardconv.convert(model, tmp_path / "out", 2, pp=2, check=False)
    found = run_processes(4, measured, str(tmp_path / "out"))
    for stage, part in enumerate(parts(plan)):
        require_predicted(part, found[2 * stage : 2 * stage + 2])
