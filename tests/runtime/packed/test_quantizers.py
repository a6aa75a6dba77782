"""Whether packed weights can be computed with here: told before anything is read, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.plan import PackedDim, PackedTensor, Packing
from shardconv_runtime.packed import quantizers
from shardconv_runtime.packed.fp8 import Fp8
from shardconv_runtime.packed.quantizers import Quantized, require_computable

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


VALUES = (PackedTensor("*", "uint8", (PackedDim(0, 1), PackedDim(1, 1))),)


def check(method: str, settings: dict[str, Any], tensors: tuple[PackedTensor, ...] = VALUES) -> None:
    quantized = Quantized(settings, torch.device("cpu"), torch.bfloat16)
    require_computable(quantized, [Packing(method, tensors)])


def test_a_plain_model_needs_nothing() -> None:
    require_computable(Quantized({}, torch.device("cpu"), torch.bfloat16), [])


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizers, "_is_installed", lambda package: package == "accelerate")
    with pytest.raises(PlanError, match=r"needs kernels .*pip install kernels; or pass dequantize=True"):
        check("fp8", FP8)


def test_transformers_does_not_dequantize_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizers, "_is_installed", lambda package: True)
    with pytest.raises(PlanError, match=r"fp8.*this is a cpu device; pass dequantize=True"):
        check("fp8", FP8)
    monkeypatch.setattr(Fp8, "on_gpus_only", False)
    with pytest.raises(PlanError, match=r"fp8.*no kernels for that on this cpu device; pass dequantize=True"):
        check("fp8", FP8)


@pytest.mark.parametrize("method", ["mxfp4", "fbgemm_fp8"])
def test_formats_that_would_be_decompressed_are_refused(method: str) -> None:
    with pytest.raises(PlanError, match=r"would decompress all of them.*dequantize=True"):
        check(method, {"quant_method": method})


@pytest.mark.parametrize(
    ("values", "dtype", "scale"),
    [
        ("*_packed", "int32", (PackedDim(0, 1), PackedDim(1, 32))),
        ("*", "int8", (PackedDim(0, 1), PackedDim(None, 1))),
        ("*", "float8_e4m3fn", (PackedDim(0, 128), PackedDim(1, 128))),
    ],
)
def test_so_are_others_of_compressed_tensors_than_float8_of_rows(
    values: str, dtype: str, scale: tuple[PackedDim, ...]
) -> None:
    tensors = PackedTensor(values, dtype, ()), PackedTensor("*_scale", "float32", scale)
    with pytest.raises(PlanError, match=r"would decompress all of them.*dequantize=True"):
        check("compressed_tensors", {"quant_method": "compressed-tensors"}, tensors)


@pytest.mark.parametrize("kind", ["Int8DynamicActivationInt8WeightConfig", "Int4WeightOnlyConfigV9"])
def test_so_is_torchao_that_quantizes_activations(kind: str) -> None:
    settings = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}}
    with pytest.raises(PlanError, match=r"no module computes with such weights \(torchao\)"):
        check("torchao", settings)


def test_settings_of_another_method_are_refused() -> None:
    with pytest.raises(PlanError, match=r"packed by gptq, and config.json says awq"):
        check("gptq", {"quant_method": "awq"})


def test_settings_that_transformers_does_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizers, "_is_installed", lambda package: True)
    with pytest.raises(PlanError, match=r"cannot compute here: .*dequantize=True"):
        check("awq", {"quant_method": "awq", "version": "none that exists"})


@pytest.mark.parametrize(
    ("method", "device", "rows", "backend"),
    [
        ("gptq", "cpu", 24, "gptq_torch"),
        ("awq", "cpu", 24, "torch_awq"),
        ("gptq", "cpu", 32, None),
        ("awq", "cuda", 24, None),
    ],
)
def test_kernels_fit_the_local_rows(method: str, device: str, rows: int, backend: str | None) -> None:
    scales = PackedTensor("scales", "float16", (PackedDim(1, 32), PackedDim(0, 1)))
    quantized = Quantized({"quant_method": method}, torch.device(device), torch.float16)
    settings = quantizers._settings(quantized, [Packing(method, (scales,))], [64, rows])
    assert settings.get("backend") == backend


def test_in_act_order_the_kernel_does_not_suppose_full_groups() -> None:
    scales = PackedTensor("scales", "float16", (PackedDim(None, 4), PackedDim(0, 1)))
    quantized = Quantized({"quant_method": "gptq"}, torch.device("cuda"), torch.float16)
    settings = quantizers._settings(quantized, [Packing("gptq", (scales,))], [64])
    assert settings["backend"] == "gptq_torch"
