"""Models of the zoo that are no plain decoders, converted and loaded in real processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
from distributed import run_processes
from made_inputs import make_inputs
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardconv

from .measure import difference
from .models import build
from .saved import save_random

CASES = [
    ("causal", "bamba", 2),
    ("causal", "deepseek_v3", 4),
    ("causal", "gpt_oss", 3),
    ("seq2seq", "t5", 3),
    ("masked", "deberta-v2", 2),
    ("other", "qwen2/token classification", 3),
    # e2e/test_other_inputs.py shows on two ranks what these do:
    pytest.param("other", "clip", 2, marks=pytest.mark.slow),
    pytest.param("other", "llava", 2, marks=pytest.mark.slow),
    pytest.param("other", "whisper", 4, marks=pytest.mark.slow),
]
FLOAT32_INSIDE = ("bamba", "deepseek_v3")


def outputs(model: nn.Module, inputs: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Every tensor that the model returns."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product has no float64 on CPUs
    with torch.no_grad():
        return [t for t in pytree.tree_leaves(model(**inputs, **options)) if isinstance(t, Tensor)]


@pytest.mark.slow
def test_a_parameter_without_elements(tmp_path: Path) -> None:
    """A matrix that exists where two sizes differ, and here they do not: stored, loaded, and back."""
    zoo = build("masked", "mobilebert", embedding_size=64, hidden_size=64)
    whole = zoo.model_class._from_config(zoo.config, dtype=torch.float64).eval()
    assert any(not parameter.numel() for parameter in whole.parameters())
    whole.save_pretrained(tmp_path / "model")
    inputs = make_inputs(whole, seed=5)
    want = outputs(whole, inputs.tensors, inputs.options)
    shardconv.convert(tmp_path / "model", tmp_path / "out", tp=2)
    for got in run_processes(2, outputs_on_rank, tmp_path / "out", inputs.tensors, inputs.options):
        assert difference(got, want) < 1e-9
    shardconv.reshard(tmp_path / "out", tmp_path / "three", tp=3)
    shardconv.merge(tmp_path / "three", tmp_path / "merged")
    merged = zoo.model_class.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    assert difference(outputs(merged, inputs.tensors, inputs.options), want) < 1e-9


def outputs_on_rank(path: Path, inputs: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    return outputs(shardconv_runtime.load(path), inputs, options)


@pytest.mark.parametrize(("family", "model_type", "tp"), CASES)
def test_converted_and_loaded(family: str, model_type: str, tp: int, tmp_path: Path) -> None:
    whole = save_random(family, model_type, tmp_path / "model")
    inputs = make_inputs(whole, seed=5)
    want = outputs(whole, inputs.tensors, inputs.options)
    shardconv.convert(tmp_path / "model", tmp_path / "out", tp=tp)
    tolerance = 1e-5 if model_type in FLOAT32_INSIDE else 1e-9
    for got in run_processes(tp, outputs_on_rank, tmp_path / "out", inputs.tensors, inputs.options):
        assert difference(got, want) < tolerance
