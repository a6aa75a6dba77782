"""GPTQ: integers of 2, 4 or 8 bits, packed along the inputs, with a factor and a zero point for each group.

``g_idx`` gives the group of each input. As a rule, groups are consecutive inputs; in *act-order* any inputs
form a group, and factors and zero points are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, SourceError
from ..format.plan import PackedDim, Packing
from .number_formats import WORD, unpacked
from .packed_format import PackedFormat, Part, fill_as_stored
from .stored_weights import (
    REMEDY,
    Checkpoint,
    Found,
    StoredGroup,
    WeightSlice,
    along,
    info,
    matrix,
    require_owners,
)

BITS = (2, 4, 8)
COMPANIONS = (".qweight", ".qzeros", ".g_idx")
SCALES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Gptq(PackedFormat):
    """Weights of linear layers."""

    method = "gptq"
    quant_methods = ("gptq",)
    packages = ("gptqmodel", "optimum")
    why = "gptqmodel has the kernels, for CPUs and GPUs, and optimum puts them into the model"
    quantizer = "gptq"
    is_of_linear_layers = True

    zeros_minus_one: bool = True
    """Whether zero points are stored less one, as in the first version of the format."""

    def configured(self, settings: Mapping[str, Any], where: str) -> Gptq:
        """See ``PackedFormat``."""
        form = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
        bits = settings.get("bits")
        if form not in ("gptq", "gptq_v2"):
            raise SourceError(
                f"{where} is quantized with gptq in the variant {form}; gptq and gptq_v2 are covered{REMEDY}"
            )
        if bits is not None and bits not in BITS:
            raise SourceError(
                f"{where} is quantized with gptq in {bits} bits; 2, 4 and 8 are covered{REMEDY}"
            )
        return Gptq(form == "gptq")

    def find(self, checkpoint: Checkpoint) -> dict[str, Found]:
        """See ``PackedFormat``."""
        modules = [n.removesuffix(".qweight") for n in checkpoint.tensors if n.endswith(".qweight")]
        weights = {f"{module}.weight": self._module(checkpoint, module) for module in modules}
        require_owners(checkpoint, weights, COMPANIONS, self.method)
        return weights

    def _module(self, checkpoint: Checkpoint, module: str) -> Found:
        names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
        words, outputs = matrix(checkpoint, names["qweight"], names["qweight"])
        groups, _ = matrix(checkpoint, names["scales"], names["qweight"])
        inputs = math.prod(info(checkpoint, names["g_idx"], names["qweight"]).shape)
        bits = words * WORD // max(inputs, 1)
        if bits * inputs != words * WORD or bits not in BITS:
            raise SourceError(
                f"{names['qweight']} has {words} words for {inputs} inputs, that is "
                f"{words * WORD / max(inputs, 1):g} bits; 2, 4 and 8 are covered{REMEDY}"
            )
        group = StoredGroup(checkpoint, (outputs, inputs), names)
        group.add("g_idx", ["int32"], (PackedDim(1, 1),))
        shared = _shared(names["g_idx"], checkpoint.read(names["g_idx"]), groups)
        group.add("qweight", ["int32"], (PackedDim(1, WORD // bits), PackedDim(0, 1)))
        group.add("qzeros", ["int32"], (shared, PackedDim(0, WORD // bits)))
        group.add("scales", SCALES, (shared, PackedDim(0, 1)))
        return group.found(self.method, bits=bits, zeros_minus_one=int(self.zeros_minus_one))

    def dequantized(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
        """Compute factor * (integer - zero point) in the dtype of the factors, as the library does in torch.

        Zero points that are stored less one are corrected a word at a time, as the library does.
        """
        settings, dims = dict(packing.settings), {stored.name: stored.dims for stored in packing.tensors}
        bits, zeros = settings["bits"], tensors["qzeros"]
        if settings["zeros_minus_one"]:
            zeros = zeros + sum(1 << shift for shift in range(0, WORD, bits))
        values = unpacked(tensors["qweight"], bits, 0)
        groups = dims["scales"][0]
        indices = tensors["g_idx"] if groups.of is None else held.local_steps(groups.of, groups.step)
        indices = indices.to(values.device).long()
        return (tensors["scales"][indices] * (values - unpacked(zeros, bits, 1)[indices])).T

    def check(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, name: str) -> None:
        """Check that the group of each input exists, and is the one of consecutive inputs."""
        columns = tensors["g_idx"].cpu().long()
        groups = next(stored.dims[0] for stored in packing.tensors if stored.name == "scales")
        if groups.of is None:
            if columns.numel() and not 0 <= int(columns.min()) <= int(columns.max()) < groups.step:
                raise CheckpointError(
                    f"{name}: g_idx names a group outside of the {groups.step} of the weight"
                )
        elif not torch.equal(columns, held.positions(1) // groups.step):
            raise CheckpointError(f"{name}: g_idx does not count groups of {groups.step} consecutive inputs")

    def kernel_settings(self, packings: Collection[Packing], *, tiles: bool) -> Mapping[str, Any]:
        """See ``PackedFormat``."""
        # In act-order, others suppose that each group has its full size.
        return {} if tiles and not any(map(_is_in_act_order, packings)) else {"backend": "gptq_torch"}

    def fill(self, module: nn.Module, attribute: str, part: Part) -> None:
        """Fill a module of GPTQ; groups are counted from the first local one if factors are sharded."""
        groups, indices = part.dims("scales")[0], part.tensors["g_idx"]
        if groups.of is not None:
            local = part.held.local_steps(groups.of, groups.step)
            indices = local.to(device=indices.device, dtype=indices.dtype)
        fill_as_stored(module, attribute, {**part.tensors, "g_idx": indices})


def _is_in_act_order(packing: Packing) -> bool:
    """Return whether any inputs may form a group, so that a part of them has some of each group."""
    scales = next((tensor for tensor in packing.tensors if tensor.name == "scales"), None)
    return scales is not None and scales.dims[0].of is None and scales.dims[0].step > 1


def _shared(name: str, indices: Tensor, groups: int) -> PackedDim:
    """Return the dim of factors along the inputs, which have these groups."""
    indices = indices.long()
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < groups:
        raise SourceError(f"{name} names a group outside of the {groups} of the weight{REMEDY}")
    size = int((indices == 0).sum())
    consecutive = size and torch.equal(indices, torch.arange(len(indices)) // size)
    if consecutive and -(-len(indices) // size) == groups:
        return along(1, size, len(indices))
    return PackedDim(None, groups)
