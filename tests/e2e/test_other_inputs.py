"""Models that are called with images or sounds, and other heads: converted, loaded by processes, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
from distributed import run_processes
from made_inputs import make_inputs
from shardconv_runtime.errors import PlanError
from torch import Tensor
from torch.utils import _pytree as pytree
from zoo.measure import difference
from zoo.saved import save_random

import shardconv
from shardconv.simulation.model_runs import Float64

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
    plan = shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2, check=False)
    assert not plan.left_out
    for found, tokens in run_processes(2, outputs_on_rank, tmp_path / "out", calls, talks):
        assert max(difference(got, wanted) for got, wanted in zip(found, want, strict=True)) < 1e-9
        assert tokens == text_about_it


def answer_on_rank(path: Path, text: dict[str, Tensor], pixel_values: Tensor) -> tuple[list[Tensor], str]:
    """The outputs for a text, and the error when there is an image beside it."""
    model = shardconv_runtime.load(path)
    with pytest.raises(PlanError) as refusal:
        model(**text, pixel_values=pixel_values)
    return outputs(model, text), str(refusal.value)


def test_images_with_which_a_model_could_not_be_traced_are_refused(tmp_path: Path) -> None:
    """The unsharded model has no such layer to take the features of an image from."""
    unsharded = save_random("other", "llava", tmp_path / "in")
    config = tmp_path / "in/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vision_feature_layer": -40}))
    plan = shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert plan.left_out == ("pixel_values",)
    text = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    image = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    want = outputs(unsharded, text)
    for found, refusal in run_processes(2, answer_on_rank, tmp_path / "out", text, image):
        assert difference(found, want) < 1e-9
        assert refusal.startswith("pixel_values was given to a model that could not be traced with it")
