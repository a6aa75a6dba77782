"""Models that are called with images or sounds, and other heads: converted, loaded by processes, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
from distributed import run_processes
from made_inputs import make_inputs
from torch import Tensor
from torch.utils import _pytree as pytree
from zoo.measure import difference
from zoo.saved import save_random

import shardconv
from shardconv.verifying.simulation.float64 import Float64

TYPES = [
    "clip",
    "llava",
    "vit",
    "wav2vec2",
    "whisper",
    "bert/sequence classification",
    "llama/question answering",
]
TALKING = ("llava", "whisper")
"""Types that write a text about what they see or hear once; the steps after it are of text alone."""


def outputs(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """All tensors that the model returns."""
    with torch.no_grad(), Float64():
        return [t for t in pytree.tree_leaves(model(**inputs)) if isinstance(t, Tensor)]


def outputs_on_rank(
    path: Path, calls: list[dict[str, Tensor]], talks: bool
) -> tuple[list[list[Tensor]], list[int]]:
    """The outputs of each call, and what is generated from the inputs of the first."""
    model = shardconv_runtime.load(path)
    return [outputs(model, inputs) for inputs in calls], generated(model, calls[0]) if talks else []


def generated(model: Any, inputs: dict[str, Tensor]) -> list[int]:
    """Five tokens after each prompt."""
    inputs = {name: tensor for name, tensor in inputs.items() if name != "decoder_input_ids"}
    tokens = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    flat: list[int] = tokens.flatten().tolist()
    return flat


@pytest.mark.parametrize("model_type", TYPES)
def test_outputs_of_processes(tmp_path: Path, model_type: str) -> None:
    unsharded = save_random("other", model_type, tmp_path / "in")
    given = make_inputs(unsharded, seed=5).tensors
    calls = [given]
    if {"input_ids", "pixel_values"} <= set(given) and hasattr(unsharded, "lm_head"):
        text = given["input_ids"].clone().clamp(max=200)
        calls.append({"input_ids": text, "attention_mask": given["attention_mask"]})
    want = [outputs(unsharded, inputs) for inputs in calls]
    talks = model_type in TALKING
    text_about_it = generated(unsharded, given) if talks else []
    plan = shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert not any(note.startswith("traced without") for note in plan.notes)
    for found, tokens in run_processes(2, outputs_on_rank, tmp_path / "out", calls, talks):
        assert max(difference(got, wanted) for got, wanted in zip(found, want, strict=True)) < 1e-9
        assert tokens == text_about_it
