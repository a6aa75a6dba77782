"""Weights that are quantized as compressed-tensors does, compared with that library byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_processes
from quantized_conversions import dense, encoder_decoder, mixture, quantized, require_equal, saved, stored
from shardconv_runtime.errors import OptionError, SourceError
from shardconv_runtime.format.plan import parameter_plans

import shardconv
from shardconv.arguments import Quantizing

pytestmark = pytest.mark.formats

SCHEMES = ("fp8_dynamic", "w4a16", "w8a16", "w8a8")


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("compressed_tensors")


def multimodal() -> Any:
    """A model whose modules have other names in checkpoints."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    text = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=1,
        vocab_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=60)
    return transformers.LlavaForConditionalGeneration(config)


def by_library(cls: Any, source: Path, directory: Path, scheme: str, ignore: list[str]) -> Path:
    """The library's own way on the unsharded model."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = cls.from_pretrained(source, dtype=torch.bfloat16)
    config = QuantizationConfig(config_groups={scheme.upper(): ["Linear"]}, ignore=ignore)
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if settings := getattr(module, "quantization_scheme", None):
            weight = module.weight.data
            groups = weight.unflatten(1, (-1, settings.weights.group_size or weight.shape[1]))
            factors, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), settings.weights)
            module.weight_scale.data = factors
    compressor: Any = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory / "library")
    compressor.update_config(directory / "library")
    return directory / "library"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_bits_and_the_config_of_the_library(scheme: str, tmp_path: Path) -> None:
    source = saved(dense(), tmp_path)
    expected = by_library(transformers.LlamaForCausalLM, source, tmp_path, scheme, ["lm_head"])
    for tp in (2, 3):
        require_equal(quantized(source, tmp_path, tp, scheme)[1], expected)
    assert shardconv.verify(tmp_path / "out-3", against=source).num_tensors > 20


def test_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    source = saved(encoder_decoder(), tmp_path)
    plain = [
        "lm_head",
        "encoder.block.0.layer.1.DenseReluDense.wo",
        "decoder.block.0.layer.2.DenseReluDense.wo",
    ]
    expected = by_library(transformers.T5ForConditionalGeneration, source, tmp_path, "w4a16", plain)
    require_equal(quantized(source, tmp_path, 2, "w4a16")[1], expected)


def test_modules_with_other_names_in_the_checkpoint(tmp_path: Path) -> None:
    source, cls = saved(multimodal(), tmp_path), transformers.LlavaForConditionalGeneration
    _, exported = quantized(source, tmp_path, 2, "w4a16")
    library = by_library(cls, source, tmp_path, "w4a16", ["lm_head"])
    ours, theirs = stored(exported), stored(library)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # The library writes the first name only, and transformers then finds no head.
    config, of_library = (json.loads((each / "config.json").read_text()) for each in (exported, library))
    assert config["quantization_config"].pop("ignore") == ["language_model.lm_head", "lm_head"]
    assert of_library["quantization_config"].pop("ignore") == ["language_model.lm_head"]
    assert config == of_library
    model, loading = cls.from_pretrained(exported, output_loading_info=True)
    assert not loading["missing_keys"]
    head = ours["language_model.lm_head.weight torch.bfloat16 [64, 256]"].view(torch.bfloat16)
    assert torch.equal(model.lm_head.weight, head.reshape(64, 256))
    assert shardconv.verify(tmp_path / "out-2", against=source).num_tensors == 97


def test_weights_without_full_groups_stay_plain(tmp_path: Path) -> None:
    source = saved(dense(hidden_size=192), tmp_path)
    plan, exported = quantized(source, tmp_path, 2, "w4a16")
    names = [f"self_attn.{name}_proj" for name in "qkv"] + [f"mlp.{name}_proj" for name in ("gate", "up")]
    plain = [f"model.layers.0.{name}" for name in names]
    assert sum(entry.packing is not None for entry in plan.parameters) == 2
    assert sum("gate_proj [640, 192] and 4 others are not quantized" in note for note in plan.notes) == 1
    cls = transformers.LlamaForCausalLM
    require_equal(exported, by_library(cls, source, tmp_path, "w4a16", ["lm_head", *plain]))


def test_stacks_of_experts_are_refused_unless_they_are_kept(tmp_path: Path) -> None:
    source = saved(mixture(256), tmp_path)
    with pytest.raises(SourceError, match=r"experts.gate_up_proj .*--keep 'model.layers.\*.mlp.experts'"):
        shardconv.convert(source, tmp_path / "out", 2, quantize="w4a16", check=False)
    kept = Quantizing("w4a16", keep=("*.experts",))
    plan = shardconv.convert(source, tmp_path / "out", 2, quantize=kept, check=False)
    packings = {name: entry.packing for name, entry in parameter_plans(plan).items()}
    assert packings["model.layers.0.self_attn.q_proj.weight"] is not None
    assert packings["model.layers.0.mlp.experts.gate_up_proj"] is None
    assert shardconv.verify(tmp_path / "out", against=source).num_tensors == 20


def test_names_that_are_near() -> None:
    with pytest.raises(OptionError, match="not in 'w4a61'; the nearest is w4a16"):
        Quantizing("w4a61")


def logits_of_rank(path: Path) -> torch.Tensor:
    """Runs on each rank."""
    import shardconv_runtime

    model = shardconv_runtime.load(path, dequantize=True, dtype="float64")
    with torch.no_grad():
        return model(torch.arange(14).reshape(2, 7)).logits


@pytest.mark.parametrize("scheme", ["fp8_dynamic", "w4a16"])
def test_ranks_compute_with_the_weights_that_transformers_loads(scheme: str, tmp_path: Path) -> None:
    _, exported = quantized(saved(dense(), tmp_path), tmp_path, 2, scheme)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.LlamaForCausalLM.from_pretrained(exported, quantization_config=config)
    with torch.no_grad():
        expected = model.double()(torch.arange(14).reshape(2, 7)).logits
    for logits in run_processes(2, logits_of_rank, tmp_path / "out-2"):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)  # norms compute in float32
