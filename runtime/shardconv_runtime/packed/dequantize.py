"""From stored tensors to the weight that they stand for, of the whole weight or a part of it.

The part of a dequantized weight and the dequantized part have the same bits: each value depends on its own
code and factors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..format.plan import Packing
from . import awq, bnb, compressed_tensors, exponents, fp8, gptq, mxfp4
from .held import Held, stored_shape

FORMULAS: dict[str, Callable[[Packing, Mapping[str, Tensor], Held], Tensor]] = {
    "awq": awq.dequantized,
    "bnb_4bit": bnb.dequantized_4bit,
    "bnb_8bit": bnb.dequantized_8bit,
    "compressed_tensors": compressed_tensors.dequantized,
    "fp8": fp8.dequantized,
    "gptq": gptq.dequantized,
    "mxfp4": mxfp4.dequantized,
}
"""By the method: from local stored tensors to the local weight, in the dtype that the library computes."""

CHECKS: dict[str, Callable[[Packing, Mapping[str, Tensor], Held, str], None]] = {
    "bnb_4bit": bnb.check_4bit,
    "compressed_tensors": compressed_tensors.check,
    "fp8": exponents.check,
    "gptq": gptq.check,
    "mxfp4": exponents.check,
}
"""What is checked beside shapes, dtypes and that factors are finite."""


def dequantize(packing: Packing, tensors: Mapping[str, Tensor], held: Held, dtype: torch.dtype) -> Tensor:
    """The local weight; no collective runs.

    Args:
        packing: of the parameter.
        tensors: local stored tensors by the names of the packing, in the shape of its dims.
        held: the part of the weight that they are.
        dtype: of the result. It is computed as the format's library does, and rounded to this dtype.
    """
    if 0 in held.local_shape:
        return torch.empty(held.local_shape, dtype=dtype)
    return FORMULAS[packing.method](packing, tensors, held).to(dtype).contiguous()


def check_values(packing: Packing, tensors: Mapping[str, Tensor], held: Held, name: str) -> None:
    """Check local stored tensors, with their values, where ``dequantize`` could not.

    Args:
        name: of the parameter, for messages.

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
        if stored.name != "*" and tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise CheckpointError(f"{name}: its stored tensor {stored.name} has values that are not finite")
    if packing.method in CHECKS and 0 not in held.local_shape:
        CHECKS[packing.method](packing, tensors, held, name)
