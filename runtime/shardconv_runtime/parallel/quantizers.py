"""transformers' quantizers, which know the modules of each format, and whether they run here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from ..errors import PlanError, brief
from ..format.header import dtype_name
from ..format.plan import PackedDim, Packing
from ..packed.schemes import requirement

COMPUTED = {
    "awq": "awq",
    "bnb_4bit": "bitsandbytes",
    "bnb_8bit": "bitsandbytes",
    "compressed_tensors": "compressed-tensors",
    "fp8": "fp8",
    "gptq": "gptq",
    "torchao": "torchao",
}
"""Methods of packings whose modules keep the weights as they are stored, and their ``quant_method``."""

ON_GPUS = frozenset({"compressed_tensors", "fp8"})
"""Methods whose kernels are only for GPUs."""

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
    """Check that packed parameters can be computed with as they are stored.

    Args:
        quantized: the model.
        packings: the packings of its packed parameters.
        compiled: whether it is to be compiled.

    Raises:
        PlanError: a package is missing, or this device cannot. The message has the remedy.
    """
    found = list(packings)
    if found and not quantizer_of(quantized, found).is_compileable and compiled:
        raise PlanError(
            "compile=True: modules that compute with these packed weights cannot be compiled; leave it out, "
            "or pass dequantize=True"
        )


def quantizer_of(quantized: Quantized, packings: Iterable[Packing], rows: Iterable[int] = ()) -> Any:
    """Return transformers' quantizer of a model whose weights are already quantized.

    Args:
        quantized: the model.
        packings: the packings of its packed parameters.
        rows: local numbers of outputs of their layers.

    Raises:
        PlanError: see ``require_computable``.
    """
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
    wanted = quantizer.update_dtype(quantized.dtype)
    if wanted != quantized.dtype:
        raise PlanError(
            f"the model is quantized ({method}), and its kernels compute in {wanted} on this device, not in "
            f"{quantized.dtype}; pass dtype={dtype_name(wanted)!r}"
        )
    return quantizer


def _require_kept(packing: Packing, quantized: Quantized, method: str) -> None:
    """Check that some module computes with such a weight as it is stored."""
    if not _is_computed(packing, quantized.settings):
        raise PlanError(
            f"no module computes with such weights ({packing.method}) as they are stored, and transformers "
            f"would decompress all of them; {_INSTEAD}"
        )
    if COMPUTED[packing.method] != method:
        raise PlanError(
            f"the weights are packed by {packing.method}, and config.json says {method}; convert again"
        )
    needed = requirement(packing.method)
    missing = [name for name in needed.packages if not _is_installed(name)]
    if missing:
        raise PlanError(
            f"computing with weights quantized with {packing.method} needs {' and '.join(missing)} "
            f"({needed.why}): pip install {' '.join(missing)}; or {_INSTEAD}"
        )
    if packing.method in ON_GPUS and quantized.device.type == "cpu":
        raise PlanError(f"weights quantized with {method} need a GPU, and this is a cpu device; {_INSTEAD}")


def _is_computed(packing: Packing, settings: Mapping[str, Any]) -> bool:
    if packing.method == "torchao":
        # Activations must stay as they are, since the header of the file says nothing of them.
        names, todo = [], [settings.get("quant_type")]
        while todo:
            value = todo.pop()
            if isinstance(value, Mapping):
                names += [str(value["_type"])] if "_type" in value else []
                todo += value.values()
        configs = [name for name in names if name.endswith("Config") and not name.startswith("Fqn")]
        return bool(configs) and all(name.endswith("WeightOnlyConfig") for name in configs)
    if packing.method == "compressed_tensors":
        # Whether values are float8 with a factor for each row, or for all.
        stored = {tensor.name: tensor for tensor in packing.tensors}
        values, scale = stored.get("*"), stored["*_scale"]
        return (
            values is not None
            and values.dtype == "float8_e4m3fn"
            and "*_zero_point" not in stored
            and all((dim.of == 0 and dim.step == 1) or dim == PackedDim(None, 1) for dim in scale.dims)
        )
    return packing.method in COMPUTED


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def _settings(quantized: Quantized, packings: list[Packing], rows: Iterable[int]) -> dict[str, Any]:
    """Return the settings with the choice of a kernel that computes parts of a weight rightly."""
    methods = {packing.method for packing in packings}
    tiles = quantized.device.type != "cpu" or not any(count % CPU_ROWS for count in rows)
    settings = dict(quantized.settings)
    if "compressed_tensors" in methods:
        settings["use_optimized_inference"] = True  # otherwise all is decompressed at the first call
    if "gptq" in methods and (not tiles or any(_is_in_act_order(packing) for packing in packings)):
        settings["backend"] = "gptq_torch"  # in act-order, others suppose that each group has its full size
    if "awq" in methods and not tiles:
        settings["backend"] = "torch_awq"
    return settings


def _is_in_act_order(packing: Packing) -> bool:
    """Return whether any inputs may form a group, so that a part of them has some of each group."""
    scales = next((tensor for tensor in packing.tensors if tensor.name == "scales"), None)
    return (
        packing.method == "gptq"
        and scales is not None
        and scales.dims[0].of is None
        and scales.dims[0].step > 1
    )
