"""The packed formats: their modules here, the packages that compute with them, and how to dequantize."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, SourceError
from ..format.plan import Packing
from . import awq, bnb, compressed_tensors, fbgemm_fp8, fp8, gptq, mxfp4, number_formats, torchao
from .awq import AwqScheme
from .bnb import BnbScheme
from .compressed_tensors import CompressedScheme
from .fbgemm_fp8 import FbgemmFp8Scheme
from .fp8 import Fp8Scheme
from .gptq import GptqScheme
from .mxfp4 import Mxfp4Scheme
from .stored_weights import Scheme, WeightSlice, stored_shape
from .torchao import TorchaoScheme

# The format of a checkpoint, by the ``quantization_config`` of its config.

SCHEMES: dict[str, Callable[[Mapping[str, Any], str], Scheme]] = {
    "awq": AwqScheme.of,
    "bitsandbytes": lambda settings, where: BnbScheme(),
    "compressed-tensors": CompressedScheme.of,
    "fbgemm_fp8": lambda settings, where: FbgemmFp8Scheme(),
    "fp8": Fp8Scheme.of,
    "gptq": GptqScheme.of,
    "mxfp4": lambda settings, where: Mxfp4Scheme(),
    "mxfp8": Fp8Scheme.of,
    "torchao": lambda settings, where: TorchaoScheme(),
}
"""``quant_method`` -> scheme for its settings."""


def scheme_of(settings: Mapping[str, Any], where: str, *, dequantize: bool = False) -> Scheme:
    """Return the scheme of a quantized checkpoint.

    Args:
        settings: its ``quantization_config``.
        where: the checkpoint, for messages.
        dequantize: the model is to compute with plain weights, and a plain cache.

    Raises:
        SourceError: no such method is known, or the settings ask for a variant that is not covered.
    """
    found = settings.get("quant_method")
    if found is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    else:
        method = str(getattr(found, "value", found) or "")
    if method not in SCHEMES:
        raise SourceError(
            f"{where} is quantized ({method or 'an unnamed method'}), which cannot be sharded; convert the "
            f"unquantized model, or one that is quantized with {', '.join(sorted(SCHEMES))}"
        )
    left_out = ("kv_cache_scheme",) if dequantize else ()
    known = {name: value for name, value in settings.items() if name not in left_out}
    return SCHEMES[method]({**known, "quant_method": method}, where)


# Formats that also quantize activations may scale each token by its own values.


def rounds_activations(settings: Mapping[str, Any]) -> bool:
    """Return whether each token's activations are scaled by a factor from that token.

    Each rank of a row-parallel layer then takes it from its own part of the token.

    Args:
        settings: a ``quantization_config``.
    """
    match settings.get("quant_method"):
        case "fp8" | "mxfp8":
            return bool(settings.get("activation_scheme", "dynamic") == "dynamic")
        case "fbgemm_fp8":
            return True
        case "compressed-tensors":
            groups = settings.get("config_groups") or {}
            return any(_is_dynamic(group) for group in groups.values())
        case _:
            return bool(settings.get("load_in_8bit"))


def _is_dynamic(group: Any) -> bool:
    inputs = group.get("input_activations") if isinstance(group, Mapping) else None
    return isinstance(inputs, Mapping) and bool(inputs.get("dynamic"))


@dataclass(frozen=True, slots=True)
class Requirement:
    """The packages that one format needs."""

    packages: tuple[str, ...]
    """Packages that transformers imports, by their names on pip."""
    why: str
    """Their purpose, and where they compute; a phrase for errors and model cards."""

    @property
    def command(self) -> str:
        """Return the command that installs the packages."""
        return f"pip install {' '.join(self.packages)}"


BNB = Requirement(("bitsandbytes", "accelerate"), "bitsandbytes has the kernels, for CPUs and GPUs")

REQUIREMENTS = {
    "awq": Requirement(("gptqmodel", "accelerate"), "gptqmodel has the kernels, for CPUs and GPUs"),
    "bnb_4bit": BNB,
    "bnb_8bit": BNB,
    "compressed_tensors": Requirement(
        ("compressed-tensors",),
        "compressed-tensors reads the tensors; it dequantizes most of its formats to compute",
    ),
    "fbgemm_fp8": Requirement(
        ("accelerate", "fbgemm-gpu-genai"),
        "fbgemm-gpu-genai has the kernels, for GPUs with compute capability 9.0 or more",
    ),
    "fp8": Requirement(
        ("accelerate", "kernels"),
        "kernels downloads those that multiply float8, for GPUs with compute capability 8.9 or more",
    ),
    "gptq": Requirement(
        ("gptqmodel", "optimum"),
        "gptqmodel has the kernels, for CPUs and GPUs, and optimum puts them into the model",
    ),
    "mxfp4": Requirement(
        ("accelerate", "kernels"),
        "kernels downloads those that multiply 4-bit floats, for GPUs with compute capability 7.5 or more",
    ),
    "torchao": Requirement(("torchao",), "torchao has the classes of tensors, for CPUs and GPUs"),
}
"""Method of a packing -> the packages that it needs."""


def requirement(method: str) -> Requirement:
    """Return the packages that computing with parameters of this method needs."""
    return REQUIREMENTS[method]


# Dequantizes the stored tensors of a weight, or of a part of it.
#
# The part of a dequantized weight and the dequantized part have the same bits: each value depends on its
# own code and factors only.


FORMULAS: dict[str, Callable[[Packing, Mapping[str, Tensor], WeightSlice], Tensor]] = {
    "awq": awq.dequantized,
    "bnb_4bit": bnb.dequantized_4bit,
    "bnb_8bit": bnb.dequantized_8bit,
    "compressed_tensors": compressed_tensors.dequantized,
    "fbgemm_fp8": fbgemm_fp8.dequantized,
    "fp8": fp8.dequantized,
    "gptq": gptq.dequantized,
    "mxfp4": mxfp4.dequantized,
    "torchao": torchao.dequantized,
}
"""Method -> function from local stored tensors to the local weight, in the dtype of the library's result."""

VALUES_AT_ONCE = 2**22
"""Values that are computed together, so that about 100 MB are needed in addition to the result."""

CHECKS: dict[str, Callable[[Packing, Mapping[str, Tensor], WeightSlice, str], None]] = {
    "bnb_4bit": bnb.check_4bit,
    "compressed_tensors": compressed_tensors.check,
    "fp8": number_formats.check,
    "gptq": gptq.check,
    "mxfp4": number_formats.check,
}
"""Checks in addition to shapes, dtypes and finite factors."""


def dequantize(
    packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, dtype: torch.dtype
) -> Tensor:
    """Compute the local weight; no collective runs.

    Args:
        packing: the packing of the parameter.
        tensors: local stored tensors by the names of the packing, in the shape of its dims.
        held: the part of the weight that they are.
        dtype: the dtype of the result. It is computed as the format's library does, and rounded to this
            dtype.
    """
    first = next(iter(tensors.values()))
    out = torch.empty(held.local_shape, dtype=dtype, device=first.device)
    if out.numel():
        # Stored tensors are cut between steps only, so a whole number of steps is computed at once.
        step = math.lcm(*(dim.step for stored in packing.tensors for dim in stored.dims if dim.of == 0))
        count = max(VALUES_AT_ONCE // math.prod(held.local_shape[1:]) // step, 1) * step
        for start in range(0, len(out), count):
            rows = out[start : start + count]
            stop = start + len(rows)
            cut = _rows(packing, tensors, held, start, stop)
            rows.copy_(FORMULAS[packing.method](packing, cut, held.rows(start, stop)))
    return out


def check_values(packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, name: str) -> None:
    """Check local stored tensors, with their values, if ``dequantize`` could not.

    Args:
        name: the name of the parameter, for messages.

    Raises:
        CheckpointError: a tensor is missing, its shape or dtype differs, a factor is not finite, or the
            values of tensors do not fit each other.
    """
    for stored in packing.tensors:
        if stored.name not in tensors:
            raise CheckpointError(f"{name}: its stored tensor {stored.name} is missing")
        tensor, shape = tensors[stored.name], stored_shape(stored, held)
        if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{stored.dtype}":
            raise CheckpointError(
                f"{name}: its stored tensor {stored.name} is {tensor.dtype} {list(tensor.shape)}, and should "
                f"be {stored.dtype} {list(shape)} for its part {list(held.local_shape)} of {list(held.shape)}"
            )
        is_factor = stored.name not in number_formats.VALUES and tensor.is_floating_point()
        if is_factor and not bool(tensor.float().isfinite().all()):
            raise CheckpointError(f"{name}: its stored tensor {stored.name} has values that are not finite")
    if packing.method in CHECKS and 0 not in held.local_shape:
        CHECKS[packing.method](packing, tensors, held, name)


def _rows(
    packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, start: int, stop: int
) -> dict[str, Tensor]:
    """Return the stored tensors for local positions of the first dim."""
    out = dict(tensors)
    for stored in packing.tensors:
        for place, dim in enumerate(stored.dims):
            if dim.of == 0:
                steps = held.local_steps(0, dim.step)[[start, stop - 1]].tolist()
                out[stored.name] = out[stored.name].narrow(place, steps[0], steps[1] - steps[0] + 1)
    return out
