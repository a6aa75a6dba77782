"""Models of the zoo, cut into two stages of two ranks, in real processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import run_processes
from made_inputs import make_inputs

import shardconv
from shardconv.plan_forms import without_extra_outputs

from .measure import difference
from .saved import save_random
from .test_processes import outputs, outputs_on_rank

CASES = [
    pytest.param("causal", "qwen3"),
    *(
        pytest.param(family, model_type, marks=pytest.mark.slow)
        for family, model_type in (
            ("causal", "gemma3_text"),
            ("causal", "mixtral"),
            ("causal", "deepseek_v3"),
            ("causal", "gpt_oss"),
            ("causal", "bamba"),
            ("causal", "falcon"),
            ("causal", "gpt_neox"),
            ("causal", "bloom"),
            ("causal", "phi3"),
            ("seq2seq", "bart"),
            ("other", "qwen2_vl"),
            ("other", "llava"),
        )
    ),
]
FLOAT32_INSIDE = ("bamba", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(("family", "model_type"), CASES)
def test_two_stages_of_two_ranks(family: str, model_type: str, tmp_path: Path) -> None:
    whole = save_random(family, model_type, tmp_path / "model")
    inputs = without_extra_outputs(make_inputs(whole, seed=5))
    want = outputs(whole, inputs.tensors, inputs.options)
    shardconv.convert(tmp_path / "model", tmp_path / "out", tp=2, pp=2)
    tolerance = 1e-5 if model_type in FLOAT32_INSIDE else 1e-9
    for got in run_processes(4, outputs_on_rank, tmp_path / "out", inputs.tensors, inputs.options):
        assert difference(got, want) < tolerance
