"""transformers' quantizers, which know the modules of each format, and whether they run here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from ..errors import PlanError, brief
from ..format.plan import Packing
from ..packed.requirements import requirement

COMPUTED = {
    "awq": "awq",
    "bnb_4bit": "bitsandbytes",
    "bnb_8bit": "bitsandbytes",
    "fp8": "fp8",
    "gptq": "gptq",
}
"""Methods of packings whose modules keep the weights as they are stored, and their ``quant_method``."""

_INSTEAD = "pass dequantize=True to load plain weights in the model's dtype"


@dataclass(frozen=True)
class Quantized:
    """How a model is quantized, and where it will compute."""

    settings: Mapping[str, Any]
    """``quantization_config`` of config.json."""
    device: torch.device
    dtype: torch.dtype
    """Of activations."""


def require_computable(quantized: Quantized, packings: Iterable[Packing], *, compiled: bool = False) -> None:
    """Check that packed parameters can be computed with as they are stored.

    Args:
        quantized: the model.
        packings: of its packed parameters.
        compiled: whether it is to be compiled.

    Raises:
        PlanError: a package is missing, or this device cannot; the message offers what to do.
    """
    found = list(packings)
    if found and not quantizer_of(quantized, found).is_compileable and compiled:
        raise PlanError(
            "compile=True: modules that compute with these packed weights cannot be compiled; leave it out, "
            "or pass dequantize=True"
        )


def quantizer_of(quantized: Quantized, packings: Iterable[Packing]) -> Any:
    """transformers' quantizer of a model whose weights are quantized already.

    Args:
        quantized: the model.
        packings: of its packed parameters.

    Raises:
        PlanError: see ``require_computable``.
    """
    from transformers.quantizers import AutoHfQuantizer

    packings = list(packings)
    method = str(quantized.settings.get("quant_method", "bitsandbytes"))
    for used in sorted({packing.method for packing in packings}):
        if used not in COMPUTED:
            raise PlanError(
                f"weights quantized with {used} cannot be computed with as they are stored: transformers "
                f"would decompress all of them at the first call; {_INSTEAD}"
            )
        if COMPUTED[used] != method:
            raise PlanError(f"the weights are packed by {used}, and config.json says {method}; convert again")
        _require_packages(used)
    try:
        quantizer = AutoHfQuantizer.from_config(_settings(quantized, packings), pre_quantized=True)
        quantizer.validate_environment(device_map={"": quantized.device}, weights_only=True)
    except Exception as error:  # each quantizer has errors of its own
        raise PlanError(
            f"the model is quantized ({method}), and cannot compute here: {brief(error)}; {_INSTEAD}"
        ) from error
    if getattr(quantizer.quantization_config, "dequantize", False):
        raise PlanError(
            f"the model is quantized ({method}), and transformers has no kernels for that on this "
            f"{quantized.device.type} device; {_INSTEAD}"
        )
    _require_dtype(quantizer, quantized, method)
    return quantizer


def _require_packages(method: str) -> None:
    needed = requirement(method)
    missing = [name for name in needed.packages if not _is_installed(name)]
    if missing:
        raise PlanError(
            f"computing with weights quantized with {method} needs {' and '.join(missing)} ({needed.why}): "
            f"pip install {' '.join(missing)}; or {_INSTEAD}"
        )


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def _require_dtype(quantizer: Any, quantized: Quantized, method: str) -> None:
    wanted = quantizer.update_dtype(quantized.dtype)
    if wanted != quantized.dtype:
        raise PlanError(
            f"the model is quantized ({method}), and its kernels compute in {wanted} on this device, not in "
            f"{quantized.dtype}; pass dtype={str(wanted).removeprefix('torch.')!r}"
        )


def _settings(quantized: Quantized, packings: list[Packing]) -> dict[str, Any]:
    """The settings with the choice of a kernel that computes parts of a weight rightly."""
    settings = dict(quantized.settings)
    if any(_is_in_act_order(packing) for packing in packings):
        settings["backend"] = "gptq_torch"  # others take for granted that each group has its full size
    return settings


def _is_in_act_order(packing: Packing) -> bool:
    """Whether any inputs may form a group, so that a part of them has some of each group."""
    scales = next((tensor for tensor in packing.tensors if tensor.name == "scales"), None)
    return (
        packing.method == "gptq"
        and scales is not None
        and scales.dims[0].of is None
        and scales.dims[0].step > 1
    )
