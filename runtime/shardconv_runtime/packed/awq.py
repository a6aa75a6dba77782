"""AWQ: integers of 4 bits, packed along the outputs in an own order, with factors and zero points."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SourceError
from ..format.plan import PackedDim, PackedTensor, Packing
from .number_formats import WORD, unpacked
from .packed_format import PackedFormat
from .stored_weights import (
    REMEDY,
    Checkpoint,
    Found,
    StoredGroup,
    WeightSlice,
    along,
    matrix,
    require_owners,
    spread,
)

BITS = 4
PER_WORD = WORD // BITS
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions in a word of eight consecutive outputs."""
COMPANIONS = (".qweight", ".qzeros", ".scales")


@dataclass(frozen=True)
class Awq(PackedFormat):
    """Weights of linear layers."""

    method = "awq"
    quant_methods = ("awq",)
    packages = ("gptqmodel", "accelerate")
    why = "gptqmodel has the kernels, for CPUs and GPUs"
    quantizer = "awq"
    is_of_linear_layers = True

    group_size: int = 128
    """Inputs of a group; -1: all."""

    def configured(self, settings: Mapping[str, Any], where: str) -> Awq:
        """See ``PackedFormat``."""
        bits = settings.get("bits", settings.get("w_bit", BITS))
        form = str(
            settings.get("checkpoint_format") or settings.get("format") or settings.get("version") or "gemm"
        )
        size = settings.get("group_size", settings.get("q_group_size", 128))
        if bits != BITS or form.lower() != "gemm":
            raise SourceError(
                f"{where} is quantized with awq in {bits} bits in the variant {form}; 4 bits in the variant "
                f"gemm are covered{REMEDY}"
            )
        if type(size) is not int or (size < 1 and size != -1):
            raise SourceError(f"{where} is quantized with awq in groups of {size!r}{REMEDY}")
        return Awq(size)

    def find(self, checkpoint: Checkpoint) -> dict[str, Found]:
        """See ``PackedFormat``."""
        modules = [n.removesuffix(".qweight") for n in checkpoint.tensors if n.endswith(".qweight")]
        weights = {f"{module}.weight": self._module(checkpoint, module) for module in modules}
        require_owners(checkpoint, weights, COMPANIONS, self.method)
        return weights

    def _module(self, checkpoint: Checkpoint, module: str) -> Found:
        names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
        inputs, words = matrix(checkpoint, names["qweight"], names["qweight"])
        groups = along(1, inputs if self.group_size == -1 else self.group_size, inputs)
        group = StoredGroup(checkpoint, (words * PER_WORD, inputs), names)
        group.add("qweight", ["int32"], (PackedDim(1, 1), PackedDim(0, PER_WORD)))
        group.add("qzeros", ["int32"], (groups, PackedDim(0, PER_WORD)))
        group.add("scales", ["float16", "bfloat16", "float32"], (groups, PackedDim(0, 1)))
        return group.found(self.method)

    def dequantized(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
        """Compute (integer - zero point) * factor in the dtype of the factors, as the library does."""
        stored = {tensor.name: tensor for tensor in packing.tensors}
        groups = PackedTensor("zeros", "int32", stored["scales"].dims)
        zeros = spread(_in_order(tensors["qzeros"]), groups, held)
        return (_in_order(tensors["qweight"]).T - zeros) * spread(tensors["scales"], stored["scales"], held)

    def kernel_settings(self, packings: Collection[Packing], *, tiles: bool) -> Mapping[str, Any]:
        """See ``PackedFormat``."""
        return {} if tiles else {"backend": "torch_awq"}


def _in_order(words: Tensor) -> Tensor:
    """Return the integers of words, ``[n, 8 * m]`` of ``[n, m]``."""
    places = torch.tensor(PLACES, device=words.device)
    stored = unpacked(words, BITS, 1).view(*words.shape, PER_WORD)
    return stored.index_select(2, places).flatten(1)
