"""Models that are called with images or sounds, and other heads: converted, loaded by processes, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from made_inputs import make_inputs
from one_and_ranks import of_one, of_ranks, require_same
from shardconv_runtime.errors import PlanError
from small_models import save_random as save_random_model
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


PIXELS = torch.arange(2 * 3 * 32 * 32, dtype=torch.float64).view(2, 3, 32, 32).cos()
PATCHES = torch.arange(2 * 16).view(2, 16) % 3 == 0


def reconstruct(model: Any) -> Tensor:
    """The loss of masked patches, what the model makes of them, and the norms of the gradients."""
    output = model(PIXELS, bool_masked_pos=PATCHES)
    output.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    return torch.cat([output.loss[None], norm[None], output.reconstruction.flatten()])


def see_all(model: Any) -> Tensor:
    """What the model makes of an image without a mask."""
    reconstruction: Tensor = model(pixel_values=PIXELS).reconstruction
    return reconstruction.detach()


def test_patches_are_masked_or_not(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 96}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, encoder_stride=8)
    save_random_model(config, transformers.ViTForMaskedImageModeling, tmp_path / "in")
    plan = shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert not plan.left_out
    uses = [reconstruct, see_all]
    one = of_one(tmp_path / "in", uses, training=True)
    require_same(uses, one, of_ranks(tmp_path / "out", uses, training=True))


def masked_on_rank(path: Path) -> str:
    with pytest.raises(PlanError) as refusal:
        shardconv_runtime.load(path)(PIXELS, bool_masked_pos=PATCHES)
    return str(refusal.value)


def test_a_mask_of_patches_is_refused_where_there_is_no_learned_patch(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 96}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    save_random_model(config, transformers.ViTModel, tmp_path / "in")
    plan = shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2, check=False)
    assert plan.left_out == ("bool_masked_pos",)
    for refusal in run_processes(2, masked_on_rank, tmp_path / "out"):
        assert refusal.startswith("bool_masked_pos was given to a model that could not be traced with it")
