"""Dequantizes the stored tensors of a weight, or of a part of it.

The part of a dequantized weight and the dequantized part have the same bits: each value depends on its own
code and factors only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..format.plan import Packing
from . import awq, bnb, compressed_tensors, fbgemm_fp8, fp8, gptq, mxfp4, number_formats, torchao
from .held import WeightSlice, stored_shape

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
