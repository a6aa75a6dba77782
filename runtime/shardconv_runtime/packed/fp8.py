"""float8 with one factor for a tensor, or for each block of it, as transformers reads it (fp8, mxfp8).

Usual names are NAME, of values, NAME_scale_inv, of factors, and perhaps a factor of the inputs. The weights
of experts may be stacked, ``[E, out, in]``; blocks are in the last two dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SourceError
from ..format.plan import PackedDim, Packing
from .number_formats import as_factors, check_exponents, from_float8
from .packed_format import PackedFormat, Part, fill_as_stored, in_bands
from .stored_weights import (
    REMEDY,
    Checkpoint,
    Found,
    StoredGroup,
    WeightSlice,
    along,
    info,
    require_owners,
    spread,
)

VALUES = "float8_e4m3fn"
BLOCKS = {"fp8": (128, 128), "mxfp8": (1, 32)}
"""Blocks of settings that name none, by the method."""
FACTORS = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")
"""Dtypes; bytes are exponents of two."""
SCALES = {
    "_scale_inv": "*_scale_inv",
    ".scale": "scale",
    ".qscale_weight": "qscale_weight",
    "_scale": "*_scale",
}
"""Ends of the names of factors, and their names in a packing; those with a point are next to NAME.weight."""
INPUTS = ("activation_scale", "*_activation_scale", "qscale_act")
"""Names of factors of the inputs, in a packing."""
COMPANIONS = ("_scale_inv", ".qscale_weight", ".qscale_act", "activation_scale", ".input_scale")


@dataclass(frozen=True)
class Fp8(PackedFormat):
    """Matrices, and stacks of them."""

    method = "fp8"
    quant_methods = ("fp8", "mxfp8")
    packages = ("accelerate", "kernels")
    why = "kernels downloads those that multiply float8, for GPUs with compute capability 8.9 or more"
    quantizer = "fp8"
    on_gpus_only = True
    can_be_joined = True
    skips = "modules_to_not_convert"

    block: tuple[int, int] | None = None
    """Rows and columns of a block; None if a matrix has one factor."""

    def configured(self, settings: Mapping[str, Any], where: str) -> Fp8:
        """See ``PackedFormat``."""
        if settings.get("expert_dtype", "fp8") != "fp8":
            raise SourceError(f"{where} has experts in {settings['expert_dtype']} in addition to fp8{REMEDY}")
        block = settings.get("weight_block_size", BLOCKS[str(settings["quant_method"])])
        if block is None:
            return Fp8(None)
        if (
            not isinstance(block, list | tuple)
            or len(block) != 2
            or any(type(n) is not int or n < 1 for n in block)
        ):
            raise SourceError(f"{where} is quantized with fp8 in blocks of {block}{REMEDY}")
        return Fp8((block[0], block[1]))

    def find(self, checkpoint: Checkpoint) -> dict[str, Found]:
        """See ``PackedFormat``."""
        weights = {}
        for weight, name, stored in _factors(checkpoint):
            shape = info(checkpoint, weight, name).shape
            if len(shape) < 2:
                raise SourceError(f"{weight} is {list(shape)}, and should have two dims or more{REMEDY}")
            inputs = {part: full for part in INPUTS if (full := _beside(weight, part)) in checkpoint.tensors}
            group = StoredGroup(checkpoint, shape, {"*": weight, stored: name, **inputs})
            group.add("*", [VALUES], tuple(PackedDim(dim, 1) for dim in range(len(shape))))
            group.add(stored, FACTORS, self._dims(shape, checkpoint.tensors[name].shape))
            for part, full in inputs.items():
                group.add(part, FACTORS[:3], _input_dims(shape, checkpoint.tensors[full].shape))
            weights[weight] = group.found(self.method)
        require_owners(checkpoint, weights, COMPANIONS, self.method)
        for name, tensor in checkpoint.tensors.items():
            if tensor.dtype == VALUES and name not in weights:
                raise SourceError(f"{name} is in float8 and lacks {name}_scale_inv{REMEDY}")
        return weights

    def _dims(self, shape: tuple[int, ...], factors: tuple[int, ...]) -> tuple[PackedDim, ...]:
        """Return the dims of the factors of a weight."""
        if factors in ((), (1,)):
            return tuple(PackedDim(None, 1) for _ in factors)
        last = len(shape) - 2
        block = self.block or shape[last:]
        stack = tuple(PackedDim(dim, 1) for dim in range(last))
        return *stack, *(along(last + i, block[i], shape[last + i]) for i in range(2))

    def dequantized(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
        """Compute values times factors in float32, as transformers does."""
        stored = next(tensor for tensor in packing.tensors if tensor.name in SCALES.values())
        return from_float8(tensors["*"], torch.float32) * spread(
            as_factors(tensors[stored.name]), stored, held
        )

    def schemes(self, dtype: str) -> Mapping[str, Mapping[str, Any]]:
        """See ``PackedFormat``."""
        return {"fp8": {"quant_method": "fp8"}}

    def packed(self, weight: Tensor, quantizer: Any) -> dict[str, Tensor]:
        """Compute values and factors by transformers; it leaves other sizes than full blocks plain."""
        operation = quantizer.get_quantize_ops()
        step = 1 if self.block is None or weight.dim() > 2 else self.block[0]
        return in_bands(weight, step, lambda rows: operation.convert({"*": rows}))

    def check(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, name: str) -> None:
        """See ``PackedFormat``."""
        check_exponents({part: t for part, t in tensors.items() if part not in self.values}, name)

    def scales_tokens(self, settings: Mapping[str, Any]) -> bool:
        """See ``PackedFormat``."""
        return bool(settings.get("activation_scheme", "dynamic") == "dynamic")

    def fill(self, module: nn.Module, attribute: str, part: Part) -> None:
        """Fill a module of fp8 under the names that transformers uses."""
        names = {**dict.fromkeys(SCALES.values(), "*_scale_inv"), "qscale_act": "activation_scale"}
        renamed = {names.get(name, name): tensor for name, tensor in part.tensors.items()}
        fill_as_stored(module, attribute, renamed)


def _factors(checkpoint: Checkpoint) -> Iterator[tuple[str, str, str]]:
    """Yield the names of weights and of their factors, in the checkpoint and in a packing."""
    for name in checkpoint.tensors:
        for end, stored in SCALES.items():
            if name.endswith(end):
                owner = name.removesuffix(end)
                weight = f"{owner}.weight" if end.startswith(".") else owner
                values = checkpoint.tensors.get(weight)
                if end == "_scale_inv" or (values is not None and values.dtype == VALUES):
                    yield weight, name, stored


def _beside(weight: str, part: str) -> str:
    """Name in the checkpoint of a tensor of the same module."""
    module, _, attribute = weight.rpartition(".")
    return f"{module}.{part.replace('*', attribute)}"


def _input_dims(shape: tuple[int, ...], factors: tuple[int, ...]) -> tuple[PackedDim, ...]:
    """Return the dims of a factor of the inputs, or of the inputs of each expert."""
    if factors in ((), (1,)):
        return tuple(PackedDim(None, 1) for _ in factors)
    return (PackedDim(0, 1),) if len(shape) > 2 else (PackedDim(None, 1),)
