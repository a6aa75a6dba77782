"""float8 with one factor for each row of a weight (quant_method fbgemm_fp8)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..format.plan import PackedDim, Packing
from .stored_weights import Checkpoint, Found, StoredGroup, WeightSlice, matrix, require_owners

SCALE = "_scale"
BOUND = "input_scale_ub"
"""Name of the bound of the factors of inputs."""
COMPANIONS = (".weight_scale", f".{BOUND}")


class FbgemmFp8Scheme:
    """Weights of linear layers."""

    def find(self, checkpoint: Checkpoint) -> dict[str, Found]:
        """See ``Scheme``."""
        names = [name.removesuffix(SCALE) for name in checkpoint.tensors if name.endswith(SCALE)]
        found = {}
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
            found[name] = group.found("fbgemm_fp8")
        require_owners(checkpoint, found, COMPANIONS, "fbgemm_fp8")
        return found


def dequantized(packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
    """Return values times the factors of their rows, in float32."""
    return tensors["*"].float() * tensors["*_scale"]
