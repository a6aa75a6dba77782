"""The registry of packed formats, and functions for all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, PlanError, SourceError
from ..format.plan import Packing
from .awq import Awq
from .bnb import Bnb4Bit, Bnb8Bit
from .compressed_tensors import CompressedTensors
from .fbgemm_fp8 import FbgemmFp8
from .fp8 import Fp8
from .gptq import Gptq
from .mxfp4 import Mxfp4
from .packed_format import PackedFormat, Part
from .stored_weights import WeightSlice, stored_shape
from .torchao import Torchao

FORMATS: tuple[PackedFormat, ...] = (
    Awq(),
    Bnb4Bit(),
    Bnb8Bit(),
    CompressedTensors(),
    FbgemmFp8(),
    Fp8(),
    Gptq(),
    Mxfp4(),
    Torchao(),
)

QUANT_METHODS = {name: each for each in FORMATS for name in each.quant_methods}
"""``quant_method`` of a checkpoint -> the format that finds its packed weights."""

_BY_METHOD = {each.method: each for each in FORMATS}


def format_of(method: str) -> PackedFormat:
    """Return the format of a packing's method, or raise ``PlanError`` if this version has none."""
    if method not in _BY_METHOD:
        raise PlanError(f"weights are packed by {method!r}; {', '.join(sorted(_BY_METHOD))} are known")
    return _BY_METHOD[method]


def format_of_checkpoint(
    settings: Mapping[str, Any], where: str, *, dequantize: bool = False
) -> PackedFormat:
    """Return the format of a quantized checkpoint; ``dequantize`` means that its cache is plain, too."""
    method = quant_method(settings)
    if method not in QUANT_METHODS:
        raise SourceError(
            f"{where} is quantized ({method or 'an unnamed method'}), which cannot be sharded; convert the "
            f"unquantized model, or one that is quantized with {', '.join(sorted(QUANT_METHODS))}"
        )
    left_out = ("kv_cache_scheme",) if dequantize else ()
    read = {name: value for name, value in settings.items() if name not in left_out}
    return QUANT_METHODS[method].configured({**read, "quant_method": method}, where)


def settings_of_scheme(scheme: str, dtype: str) -> Mapping[str, Any]:
    """Return the ``quantization_config`` of a scheme in which some format packs plain weights."""
    return next(settings[scheme] for each in FORMATS if scheme in (settings := each.schemes(dtype)))


def packing_format(settings: Mapping[str, Any]) -> PackedFormat:
    """Return the format in which a scheme packs plain weights, not configured."""
    return QUANT_METHODS[quant_method(settings)]


def can_pack(settings: Mapping[str, Any]) -> bool:
    """Return whether plain weights can be quantized in the format of a checkpoint."""
    method = quant_method(settings)
    return method in QUANT_METHODS and bool(QUANT_METHODS[method].schemes("float32"))


def scales_tokens(settings: Mapping[str, Any]) -> bool:
    """Return whether each token's activations are scaled by a factor from that token.

    Each rank of a row-parallel layer then takes it from its own part of the token.
    """
    method = quant_method(settings)
    return method in QUANT_METHODS and QUANT_METHODS[method].scales_tokens(settings)


def quant_method(settings: Mapping[str, Any]) -> str:
    """Return the name of the method in the settings of a checkpoint; empty if they name none."""
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    return str(getattr(method, "value", method) or "")


def fill_module(module: nn.Module, attribute: str, part: Part) -> None:
    """Give a module of a format's library its part of the weight ``attribute``."""
    format_of(part.packing.method).fill(module, attribute, part)


# Dequantizes the stored tensors of a weight, or of a part of it.
#
# The part of a dequantized weight and the dequantized part have the same bits: each value depends on its
# own code and factors only.

VALUES_AT_ONCE = 2**22
"""Values that are computed together, so that about 100 MB are needed in addition to the result."""

CACHED_VALUES = 2**18
"""Values whose errors are computed together, in a processor's cache."""


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
    for start, values in _dequantized_bands(packing, tensors, held, VALUES_AT_ONCE):
        out[start : start + len(values)].copy_(values)
    return out


def relative_error(packing: Packing, tensors: Mapping[str, Tensor], weight: Tensor) -> float:
    """Return the Frobenius norm of a dequantized weight minus the weight, divided by the weight's norm.

    Args:
        packing: the packing of the parameter.
        tensors: global stored tensors by the names of the packing, in the shape of its dims.
        weight: global, on the CPU.

    Returns:
        0 for a weight of zeros that is exact; not finite if a value of the weight or of the result is not.
    """
    difference = norm = 0.0
    whole = WeightSlice.whole(tuple(weight.shape))
    for start, values in _dequantized_bands(packing, tensors, whole, CACHED_VALUES):
        exact = weight[start : start + len(values)].float()
        norm += float(torch.linalg.vector_norm(exact)) ** 2
        difference += float(torch.linalg.vector_norm(values.float().sub_(exact))) ** 2
    if difference == 0:
        return 0.0
    return math.sqrt(difference / norm) if norm else math.inf


def _dequantized_bands(
    packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, values_at_once: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the local weight some rows at a time, with the first of them, as the format's library has it."""
    packed_format, shape = format_of(packing.method), held.local_shape
    if 0 in shape:
        return
    # Stored tensors are cut between steps only, so a whole number of steps is computed at once.
    step = math.lcm(*(dim.step for stored in packing.tensors for dim in stored.dims if dim.of == 0))
    count = max(values_at_once // math.prod(shape[1:]) // step, 1) * step
    for start in range(0, shape[0], count):
        stop = min(start + count, shape[0])
        cut = _rows(packing, tensors, held, start, stop)
        yield start, packed_format.dequantized(packing, cut, held.rows(start, stop))


def check_values(packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, name: str) -> None:
    """Check local stored tensors, with their values, if ``dequantize`` could not."""
    packed_format = format_of(packing.method)
    for stored in packing.tensors:
        if stored.name not in tensors:
            raise CheckpointError(f"{name}: its stored tensor {stored.name} is missing")
        tensor, shape = tensors[stored.name], stored_shape(stored, held)
        if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{stored.dtype}":
            raise CheckpointError(
                f"{name}: its stored tensor {stored.name} is {tensor.dtype} {list(tensor.shape)}, and should "
                f"be {stored.dtype} {list(shape)} for its part {list(held.local_shape)} of {list(held.shape)}"
            )
        is_factor = stored.name not in packed_format.values and tensor.is_floating_point()
        if is_factor and not bool(tensor.float().isfinite().all()):
            raise CheckpointError(f"{name}: its stored tensor {stored.name} has values that are not finite")
    if 0 not in held.local_shape:
        packed_format.check(packing, tensors, held, name)


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
