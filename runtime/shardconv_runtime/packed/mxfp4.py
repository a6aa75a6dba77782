"""MXFP4: 4-bit floats in blocks of 32 along the inputs, with an exponent of two for each; weights of experts.

The weight is ``[E, in, out]``. NAME_blocks holds it as ``[E, out, in / 32, 16]``, two values in a byte, and
NAME_scales as ``[E, out, in / 32]`` the exponents.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import SourceError
from ..format.plan import PackedDim, Packing
from .number_formats import BIAS, PER_BYTE, check_exponents, unpacked_fp4
from .packed_format import PackedFormat
from .stored_weights import REMEDY, Checkpoint, Found, StoredGroup, WeightSlice, info, require_owners

BLOCKS = "_blocks"
BLOCK = 32
COMPANIONS = (BLOCKS, "_scales")
DIMS = (PackedDim(0, 1), PackedDim(2, 1), PackedDim(1, BLOCK))


class Mxfp4(PackedFormat):
    """Stacked weights of experts."""

    method = "mxfp4"
    quant_methods = ("mxfp4",)
    packages = ("accelerate", "kernels")
    why = "kernels downloads those that multiply 4-bit floats, for GPUs with compute capability 7.5 or more"
    values = ("*_blocks",)

    def find(self, checkpoint: Checkpoint) -> dict[str, Found]:
        """See ``PackedFormat``."""
        names = [name.removesuffix(BLOCKS) for name in checkpoint.tensors if name.endswith(BLOCKS)]
        weights = {}
        for name in names:
            shape = info(checkpoint, f"{name}{BLOCKS}", name).shape
            if len(shape) != 4:
                raise SourceError(f"{name}{BLOCKS} is {list(shape)}, and should have four dims{REMEDY}")
            experts, outputs, blocks, _ = shape
            stored = {f"*{end}": f"{name}{end}" for end in COMPANIONS}
            group = StoredGroup(checkpoint, (experts, blocks * BLOCK, outputs), stored)
            group.add("*_blocks", ["uint8"], (*DIMS, PackedDim(None, BLOCK // PER_BYTE)))
            group.add("*_scales", ["uint8"], DIMS)
            weights[name] = group.found(self.method)
        require_owners(checkpoint, weights, COMPANIONS, self.method)
        return weights

    def dequantized(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
        """Compute values times powers of two, which bfloat16 holds exactly, one expert after another."""
        experts = zip(tensors["*_blocks"], tensors["*_scales"], strict=True)
        return torch.stack([_expert(blocks, scales) for blocks, scales in experts])

    def check(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, name: str) -> None:
        """See ``PackedFormat``."""
        check_exponents({part: t for part, t in tensors.items() if part not in self.values}, name)


def _expert(blocks: Tensor, scales: Tensor) -> Tensor:
    """Compute bfloat16 ``[in, out]`` from ``[out, in / 32, 16]`` and ``[out, in / 32]``."""
    powers = (scales.float() - BIAS).exp2().bfloat16()
    return (unpacked_fp4(blocks) * powers[..., None]).flatten(1).T
