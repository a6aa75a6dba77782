"""Weights that are quantized while they are converted, compared with transformers byte for byte."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from distributed import run_processes
from quantized_conversions import dense, encoder_decoder, mixture, quantized, require_equal, saved, stored
from safetensors.torch import load_file, save_file
from shardconv_runtime.checkpoint.stored_leaves import metadata_of
from shardconv_runtime.errors import MissingPackageError, OptionError, ShardconvError, SourceError
from shardconv_runtime.files import manifest
from shardconv_runtime.format.plan import parameter_plans
from shardconv_runtime.packed import packed_format, quantizers
from shardconv_runtime.packed.formats import FORMATS, settings_of_scheme
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import shardconv
from shardconv.arguments import SCHEMES, Quantizing, Writing
from shardconv.writing.workspace import Workspace


def by_transformers(cls: Any, source: Path, directory: Path, config: Any) -> Path:
    """Quantized while it is loaded, and saved; on a CPU, which only the check of the environment refuses."""
    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        model = cls.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(directory / "library")
    return directory / "library"


def test_float8_has_the_bits_of_transformers_for_any_number_of_ranks(tmp_path: Path) -> None:
    source = saved(dense(), tmp_path)
    config = transformers.FineGrainedFP8Config()
    expected = by_transformers(transformers.LlamaForCausalLM, source, tmp_path, config)
    for tp in (1, 2, 3):
        plan, exported = quantized(source, tmp_path, tp, "fp8")
        require_equal(exported, expected)
    assert sum(entry.packing is not None for entry in plan.parameters) == 7
    assert "lm_head.weight torch.bfloat16 [64, 384]" in stored(exported)
    # It is a quantized checkpoint like any other: converted as it is, it gives the same files.
    shardconv.convert(exported, tmp_path / "again", 3, check=False)
    files = [path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.safetensors")]
    assert len(files) == 4
    assert all(
        filecmp.cmp(tmp_path / "again" / path, tmp_path / "out-3" / path, shallow=False) for path in files
    )
    assert shardconv.plan(source, 3, quantize="fp8").parameters == plan.parameters
    with pytest.raises(OptionError, match=r"is quantized already \(fp8\); leave out --quantize"):
        shardconv.convert(exported, tmp_path / "twice", 2, quantize="fp8")
    shardconv.convert(exported, tmp_path / "twice", 2, quantize="fp8", dtype="bfloat16", check=False)
    assert json.loads((tmp_path / "twice/config.json").read_text())["quantization_config"]


def test_more_modules_stay_as_they_are(tmp_path: Path) -> None:
    source, first = saved(dense(), tmp_path), "model.layers.0.mlp.*"
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("down", "gate", "up")]
    chosen = Quantizing("fp8", keep=(first,))
    plan = shardconv.convert(source, tmp_path / "out", 2, quantize=chosen, check=False)
    packings = {name: entry.packing for name, entry in parameter_plans(plan).items()}
    assert not any(packings[f"{name}.weight"] for name in names)
    assert packings["model.layers.0.self_attn.q_proj.weight"] is not None
    exported = tmp_path / "exported"
    shardconv.export(tmp_path / "out", exported, format="hf")
    config = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert set(names) < set(config["modules_to_not_convert"])
    library = transformers.FineGrainedFP8Config(modules_to_not_convert=sorted(["lm_head", *names]))
    expected = by_transformers(transformers.LlamaForCausalLM, source, tmp_path, library)
    require_equal(exported, expected)
    with pytest.raises(OptionError, match=r"'model.layers.9.\*' matches no module"):
        shardconv.plan(source, 2, quantize=Quantizing("fp8", keep=("model.layers.9.*",)))


def test_verify_quantizes_the_source(tmp_path: Path) -> None:
    source = saved(dense(), tmp_path)
    quantized(source, tmp_path, 2, "fp8")
    found = shardconv.verify(tmp_path / "out-2", against=source, numerics=True)
    assert found.num_tensors == 23
    # The outputs of the ranks are compared with the quantized source, and with the source as it is.
    inputs = {"input_ids": torch.arange(14).reshape(2, 7)}
    with torch.no_grad():
        models = (transformers.LlamaForCausalLM.from_pretrained(d) for d in (source, tmp_path / "hf-2"))
        plain, quantized_logits = (model.double()(**inputs).logits for model in models)
    difference = float((quantized_logits - plain).abs().max() / plain.abs().max())
    assert found.numerics is not None
    assert found.numerics.quantization == pytest.approx(difference, rel=0.5)  # of other inputs
    assert found.numerics.worst < 1e-9


def test_errors_of_weights_are_measured_and_outlive_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(dense(num_hidden_layers=2), tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "out"
    sizes = Writing(max_file_size=400_000)
    shardconv.convert(source, whole, 2, quantize="fp8", check=False, writing=sizes)
    shardconv.export(whole, tmp_path / "exported", "hf")
    plain, stored = (load_file(d / "model.safetensors") for d in (source, tmp_path / "exported"))
    expected = {}
    for name in plain:
        if f"{name}_scale_inv" in stored:
            factors = stored[f"{name}_scale_inv"]
            values = stored[name].double() * factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected[name] = float((values - plain[name].double()).norm() / plain[name].double().norm())
    errors = manifest.read(whole).quantization_errors
    assert errors is not None
    assert len(errors) == 14
    assert errors == pytest.approx(expected, rel=1e-4)

    finish_file, finished = Workspace.finish_file, list[str]()

    def stopping(self: Workspace, index: int, checksum: str) -> None:
        finish_file(self, index, checksum)
        finished.append(self.files[index].path)
        if len(finished) == 5:
            raise OSError("full")

    monkeypatch.setattr(Workspace, "finish_file", stopping)
    with pytest.raises(ShardconvError, match="cannot be written"):
        shardconv.convert(source, out, 2, quantize="fp8", check=False, writing=sizes)
    shardconv.convert(source, out, 2, quantize="fp8", check=False, writing=sizes)
    assert len(finished) == len(set(finished)) == 9
    assert manifest.read(out) == manifest.read(whole)
    shardconv.reshard(whole, tmp_path / "resharded", 3, check=False)
    assert manifest.read(tmp_path / "resharded").quantization_errors == errors


def test_a_value_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    source = saved(dense(), tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(SourceError, match=r"up_proj.weight.* has values that are not finite.*--keep"):
        shardconv.convert(source, tmp_path / "out", 2, quantize="fp8", check=False)


@pytest.mark.parametrize("intermediate", [384, 128])  # 128: one block of inputs
def test_experts_are_quantized_one_by_one(intermediate: int, tmp_path: Path) -> None:
    source = saved(mixture(intermediate), tmp_path)
    _, exported = quantized(source, tmp_path, 2, "fp8")
    config = transformers.FineGrainedFP8Config()
    expected = load_file(
        by_transformers(transformers.MixtralForCausalLM, source, tmp_path, config) / "model.safetensors"
    )
    ours = load_file(exported / "model.safetensors")
    # transformers saves the factors of all experts in one tensor, although their values are apart.
    prefix = "model.layers.0.block_sparse_moe.experts"
    of_experts = {
        w: torch.stack([ours.pop(f"{prefix}.{i}.{w}.weight_scale_inv") for i in range(4)])
        for w in ("w1", "w2", "w3")
    }
    ours[f"{prefix}.gate_up_proj_scale_inv"] = torch.cat([of_experts["w1"], of_experts["w3"]], 1)
    ours[f"{prefix}.down_proj_scale_inv"] = of_experts["w2"]
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in ours)


def test_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    source = saved(encoder_decoder(), tmp_path)
    cls, config = transformers.T5ForConditionalGeneration, transformers.FineGrainedFP8Config()
    require_equal(quantized(source, tmp_path, 2, "fp8")[1], by_transformers(cls, source, tmp_path, config))


@pytest.mark.parametrize(
    ("make", "skipped"),
    [
        (lambda: dense(intermediate_size=192), [f"mlp.{name}_proj" for name in ("down", "gate", "up")]),
        (lambda: mixture(64), ["mlp.experts"]),  # a block would span two tensors of the checkpoint
    ],
)
def test_other_sizes_than_full_blocks_stay_plain_and_are_named(
    make: Callable[[], Any], skipped: list[str], tmp_path: Path
) -> None:
    model = make()
    source = saved(model, tmp_path)
    plan, exported = quantized(source, tmp_path, 2, "fp8")
    settings = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["lm_head", *(f"model.layers.0.{name}" for name in skipped)]
    assert sum("are not quantized: they are not made of full blocks" in note for note in plan.notes) == 1
    config = transformers.FineGrainedFP8Config(modules_to_not_convert=settings["modules_to_not_convert"])
    require_equal(exported, by_transformers(type(model), source, tmp_path, config))


def test_a_model_that_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=64)
    source = saved(transformers.GPT2LMHeadModel(config), tmp_path)
    with pytest.raises(SourceError, match="has no weight that transformers quantizes"):
        shardconv.convert(source, tmp_path / "out", 2, quantize="fp8")
    with pytest.raises(SourceError, match=r"no weight of .* consists of full blocks of fp8"):
        shardconv.plan(dense(hidden_size=192).config, 2, quantize="fp8")
    assert not (tmp_path / "out").exists()


def test_a_scheme_that_does_not_exist_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="w8a16, w8a8, not in 'nf5'; the nearest is nf4"):
        shardconv.convert(tmp_path, tmp_path / "out", 2, quantize="nf5")


@pytest.mark.parametrize("scheme", ["mxfp4", "torchao_int4"])
def test_a_scheme_for_gpus_is_refused_by_name(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"not quantized in {scheme}: .* GPUs .*; choose w4a16 or nf4"):
        shardconv.convert(tmp_path, tmp_path / "out", 2, quantize=scheme)


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizers, "_is_installed", lambda package: False)
    with pytest.raises(MissingPackageError, match="pip install bitsandbytes"):
        shardconv.plan(dense().config, 2, quantize="nf4")


def test_the_formats_have_all_schemes() -> None:
    assert sorted(scheme for each in FORMATS for scheme in each.schemes("bfloat16")) == list(SCHEMES)


def require_equal_bands(scheme: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is quantized some rows at a time is the one that is quantized at once."""
    settings = settings_of_scheme(scheme, "bfloat16")
    quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=False)
    (each,) = (each for each in FORMATS if scheme in each.schemes("bfloat16"))
    each = each.configured(quantizer.quantization_config.to_dict(), "here")
    weight = torch.randn(shape).bfloat16()
    whole = each.packed(weight, quantizer)
    monkeypatch.setattr(packed_format, "BAND_VALUES", 1)
    bands = each.packed(weight, quantizer)
    assert bands.keys() == whole.keys()
    for part, tensor in whole.items():
        assert tensor.dtype == bands[part].dtype
        assert torch.equal(tensor.view(torch.uint8), bands[part].view(torch.uint8))


@pytest.mark.parametrize("shape", [(384, 128), (3, 128, 256)])
def test_bands_of_float8(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    require_equal_bands("fp8", shape, monkeypatch)


@pytest.mark.formats
@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_bands_of_bitsandbytes(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    require_equal_bands(scheme, (150, 33), monkeypatch)


BNB = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.formats
@pytest.mark.parametrize(("scheme", "make"), [("nf4", dense), ("int8", dense), ("nf4", encoder_decoder)])
def test_bitsandbytes_has_the_bits_of_transformers(
    scheme: str, make: Callable[[], Any], tmp_path: Path
) -> None:
    model = make()
    pytest.importorskip("bitsandbytes")
    source = saved(model, tmp_path)
    config = transformers.BitsAndBytesConfig(**BNB[scheme])
    expected = by_transformers(type(model), source, tmp_path, config)
    for tp in (2, 3):
        require_equal(quantized(source, tmp_path, tp, scheme)[1], expected)


@pytest.mark.formats
@pytest.mark.parametrize(
    ("scheme", "kind", "make"),
    [
        ("torchao_int8", "Int8WeightOnlyConfig", dense),
        ("torchao_float8", "Float8WeightOnlyConfig", encoder_decoder),
    ],
)
def test_torchao_has_the_bits_of_transformers(
    scheme: str, kind: str, make: Callable[[], Any], tmp_path: Path
) -> None:
    """Also the headers, without which transformers cannot read the files."""
    quantization = pytest.importorskip("torchao.quantization")
    model = make()
    source = saved(model, tmp_path)
    config = transformers.TorchAoConfig(getattr(quantization, kind)())
    expected = by_transformers(type(model), source, tmp_path, config)
    for tp in (2, 3):
        exported = quantized(source, tmp_path, tp, scheme)[1]
        require_equal(exported, expected)
        ours, theirs = (metadata_of(d / "model.safetensors") for d in (exported, expected))
        names = json.loads(ours["tensor_names"])
        assert set(names) <= set(json.loads(theirs["tensor_names"]))  # the library lists tied names, too
        assert [ours[name] for name in names] == [theirs[name] for name in names]
    loaded = type(model).from_pretrained(exported)
    classes = {type(parameter).__name__ for parameter in loaded.parameters()}
    assert kind.replace("WeightOnlyConfig", "Tensor") in classes


@pytest.mark.formats
def test_weights_as_inputs_by_outputs_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = transformers.GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=64)
    with pytest.raises(
        SourceError, match="belongs to a Conv1D, whose weights transformers does not quantize"
    ):
        shardconv.plan(config, 2, quantize="int8")


def logits_of_rank(path: Path) -> torch.Tensor:
    """Runs on each rank."""
    import shardconv_runtime

    model = shardconv_runtime.load(path, dequantize=True, dtype="float64")
    with torch.no_grad():
        return model(torch.arange(14).reshape(2, 7)).logits


def test_ranks_compute_with_the_dequantized_weights(tmp_path: Path) -> None:
    _, exported = quantized(saved(dense(), tmp_path), tmp_path, 2, "fp8")
    model = transformers.LlamaForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)  # as on any CPU
    with torch.no_grad():
        expected = model.double()(torch.arange(14).reshape(2, 7)).logits
    for logits in run_processes(2, logits_of_rank, tmp_path / "out-2"):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def packed_logits_of_rank(path: Path) -> torch.Tensor:
    """Runs on each rank."""
    import shardconv_runtime

    model = shardconv_runtime.load(path)
    with torch.no_grad():
        return model(torch.arange(14).reshape(2, 7)).logits.float()


@pytest.mark.formats
@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_ranks_compute_with_weights_of_bitsandbytes(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    _, exported = quantized(saved(dense(), tmp_path), tmp_path, 2, scheme)
    model = transformers.LlamaForCausalLM.from_pretrained(exported)
    with torch.no_grad():
        expected = model(torch.arange(14).reshape(2, 7)).logits.float()
    first, second = run_processes(2, packed_logits_of_rank, tmp_path / "out-2")
    assert torch.equal(first, second)
    assert (first - expected).abs().max() < 0.02 * expected.abs().max()
