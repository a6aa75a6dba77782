"""float8 with one factor for each row of a weight (quant_method fbgemm_fp8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..format.plan import PackedDim, Packing
from .number_formats import from_float8
from .packed_format import PackedFormat
from .stored_weights import Checkpoint, Found, StoredGroup, WeightSlice, matrix, require_owners

SCALE = "_scale"
BOUND = "input_scale_ub"
"""Name of the bound of the factors of inputs."""
COMPANIONS = (".weight_scale", f".{BOUND}")


class FbgemmFp8(PackedFormat):
    """Weights of linear layers."""

    method = "fbgemm_fp8"
    quant_methods = ("fbgemm_fp8",)
    packages = ("accelerate", "fbgemm-gpu-genai")
    why = "fbgemm-gpu-genai has the kernels, for GPUs with compute capability 9.0 or more"

    def scales_tokens(self, settings: Mapping[str, Any]) -> bool:
        """See ``PackedFormat``."""
        return True

    def find(self, checkpoint: Checkpoint) -> dict[str, Found]:
        """See ``PackedFormat``."""
        names = [name.removesuffix(SCALE) for name in checkpoint.tensors if name.endswith(SCALE)]
        weights = {}
        for name in names:
            stored = {"*": name, "*_scale": f"{name}{SCALE}"}
            bound = f"{name.rpartition('.')[0]}.{BOUND}"
            if bound in checkpoint.tensors:
                stored[BOUND] = bound
            group = StoredGroup(checkpoint, matrix(checkpoint, name, f"{name}{SCALE}"), stored)
            group.add("*", ["float8_e4m3fn"], (PackedDim(0, 1), PackedDim(1, 1)))
            group.add("*_scale", ["float32"], (PackedDim(0, 1), PackedDim(None, 1)))
            if BOUND in stored:
                group.add(BOUND, ["float32"], (PackedDim(None, 1),))
            weights[name] = group.found(self.method)
        require_owners(checkpoint, weights, COMPANIONS, self.method)
        return weights

    def dequantized(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
        """Return values times the factors of their rows, in float32."""
        return from_float8(tensors["*"], torch.float32) * tensors["*_scale"]
