"""transformers' quantizers, which know the modules of each format, and whether they run here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from ..errors import MissingPackageError, PlanError, brief
from ..format.header import dtype_name
from ..format.plan import Packing
from .formats import format_of

CPU_ROWS = 16
"""Rows of a tile of torch's product with 4-bit integers on CPUs, which fails on other numbers of them."""

_INSTEAD = "pass dequantize=True to load plain weights in the model's dtype"


@dataclass(frozen=True)
class Quantized:
    """How a model is quantized, and where it will compute."""

    settings: Mapping[str, Any]
    """``quantization_config`` of config.json."""
    device: torch.device
    dtype: torch.dtype
    """The dtype of activations."""


def require_computable(quantized: Quantized, packings: Iterable[Packing], *, compiled: bool = False) -> None:
    """Check that packed parameters can be computed with as they are stored."""
    listed = list(packings)
    if listed and not quantizer_of(quantized, listed).is_compileable and compiled:
        raise PlanError(
            "compile=True: modules that compute with these packed weights cannot be compiled; leave it out, "
            "or pass dequantize=True"
        )


def quantizer_of(quantized: Quantized, packings: Iterable[Packing], rows: Iterable[int] = ()) -> Any:
    """Return transformers' quantizer of a model whose weights are already quantized."""
    from transformers.quantizers import AutoHfQuantizer  # imports all quantizers

    packings = list(packings)
    method = str(quantized.settings.get("quant_method", "bitsandbytes"))
    for packing in set(packings):
        _require_kept(packing, quantized, method)
    try:
        quantizer = AutoHfQuantizer.from_config(_settings(quantized, packings, rows), pre_quantized=True)
        quantizer.validate_environment(device_map={"": quantized.device}, weights_only=True)
    except Exception as error:  # each quantizer has its own errors
        raise PlanError(
            f"the model is quantized ({method}), and cannot compute here: {brief(error)}; {_INSTEAD}"
        ) from error
    has_kernel = getattr(quantizer, "use_fp8_kernel", True)
    if bool(getattr(quantizer.quantization_config, "dequantize", False)) or not has_kernel:
        raise PlanError(
            f"the model is quantized ({method}), and transformers has no kernels for that on this "
            f"{quantized.device.type} device; {_INSTEAD}"
        )
    dtype = quantizer.update_dtype(quantized.dtype)
    if dtype != quantized.dtype:
        raise PlanError(
            f"the model is quantized ({method}), and its kernels compute in {dtype} on this device, not in "
            f"{quantized.dtype}; pass dtype={dtype_name(dtype)!r}"
        )
    return quantizer


def _require_kept(packing: Packing, quantized: Quantized, method: str) -> None:
    """Check that some module computes with such a weight as it is stored."""
    packed_format = format_of(packing.method)
    if not packed_format.is_computed(packing, quantized.settings):
        raise PlanError(
            f"no module computes with such weights ({packing.method}) as they are stored, and transformers "
            f"would decompress all of them; {_INSTEAD}"
        )
    if packed_format.quantizer != method:
        raise PlanError(
            f"the weights are packed by {packing.method}, and config.json says {method}; convert again"
        )
    if missing := missing_packages(packed_format.packages):
        raise MissingPackageError(
            f"computing with weights quantized with {packing.method} needs {' and '.join(missing)} "
            f"({packed_format.why}): pip install {' '.join(missing)}; or {_INSTEAD}"
        )
    if packed_format.on_gpus_only and quantized.device.type == "cpu":
        raise PlanError(f"weights quantized with {method} need a GPU, and this is a cpu device; {_INSTEAD}")


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in names if not _is_installed(name)]


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def _settings(quantized: Quantized, packings: list[Packing], rows: Iterable[int]) -> dict[str, Any]:
    """Return the settings with the choice of a kernel that computes parts of a weight rightly."""
    tiles = quantized.device.type != "cpu" or not any(count % CPU_ROWS for count in rows)
    settings = dict(quantized.settings)
    for method in {packing.method for packing in packings}:
        alike = [packing for packing in packings if packing.method == method]
        settings |= format_of(method).kernel_settings(alike, tiles=tiles)
    return settings
