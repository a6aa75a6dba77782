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
        found = {name: _parameter(checkpoint, name) for name in names}
        require_owners(checkpoint, found, COMPANIONS, "fbgemm_fp8")
        return found


def dequantized(packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
    """Return values times the factors of their rows, in float32."""
    return tensors["*"].float() * tensors["*_scale"]


def _parameter(checkpoint: Checkpoint, name: str) -> Found:
    bound = f"{name.rpartition('.')[0]}.{BOUND}"
    names = {"*": name, "*_scale": f"{name}{SCALE}"} | ({BOUND: bound} if bound in checkpoint.tensors else {})
    group = StoredGroup(checkpoint, matrix(checkpoint, name, f"{name}{SCALE}"), names)
    group.add("*", ["float8_e4m3fn"], (PackedDim(0, 1), PackedDim(1, 1)))
    group.add("*_scale", ["float32"], (PackedDim(0, 1), PackedDim(None, 1)))
    if BOUND in names:
        group.add(BOUND, ["float32"], (PackedDim(None, 1),))
    return group.found("fbgemm_fp8")
