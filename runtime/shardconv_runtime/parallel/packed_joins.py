"""The stored tensors of several packed weights as those of one weight, which has the rows of all.

That is so in formats whose stored tensors run along the rows of the weight (its outputs) in their first dim,
or are flat in the order of rows: each weight keeps its part of the memory. Formats that pack columns first
(GPTQ, AWQ) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..packed.bnb import Blocks, block_factors, plain_state
from ..packed.held import WeightSlice
from .packed_values import Part
from .shared_storage import joined

_Stored = Mapping[str, tuple[Tensor, int | None]]
"""By name a tensor, and for how many rows or values it has one position; None: it must be the same for all
weights."""


def joined_parts(parts: Sequence[Part]) -> tuple[Part, list[Part]] | None:
    """A part with the rows of all parts, and these, which then share its memory; None if that is not exact.

    Args:
        parts: of weights with inputs of one size.
    """
    methods = {part.packing.method for part in parts}
    rule = _BY_ROWS.get(methods.pop())
    if rule is None or methods or len({part.held.local_shape[1:] for part in parts}) > 1:
        return None
    stored: list[_Stored] = []
    for index, part in enumerate(parts):
        found = rule(part, index == len(parts) - 1)
        if found is None or found.keys() != (stored or [found])[0].keys():
            return None
        stored.append(found)
    if not all(_are_alike([found[name] for found in stored]) for name in stored[0]):
        return None
    return _shared(parts, stored)


def can_be_joined(method: str) -> bool:
    """Whether weights that a method packs may be joined."""
    return method in _BY_ROWS


def _are_alike(stored: Sequence[tuple[Tensor, int | None]]) -> bool:
    first, step = stored[0]
    if len({(tensor.dtype, tensor.device, tensor.shape[1:], each) for tensor, each in stored}) > 1:
        return False
    return step is not None or all(torch.equal(_bytes(first), _bytes(tensor)) for tensor, _ in stored[1:])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _shared(parts: Sequence[Part], stored: Sequence[_Stored]) -> tuple[Part, list[Part]]:
    whole: dict[str, Tensor] = {}
    own = [dict(part.tensors) for part in parts]
    for name, (first, step) in stored[0].items():
        if step is None:
            whole[name] = first
            continue
        whole[name], shared = joined([found[name][0] for found in stored])
        for tensors, found, tensor in zip(own, stored, shared, strict=True):
            if tensors[name].data_ptr() == found[name][0].data_ptr():  # others were computed
                tensors[name] = tensor
    shapes = [part.held.local_shape for part in parts]
    held = WeightSlice.whole((sum(shape[0] for shape in shapes), *shapes[0][1:]))
    spanning = replace(parts[0], tensors=whole, held=held)
    return spanning, [replace(part, tensors=each) for part, each in zip(parts, own, strict=True)]


def _by_dims(part: Part, is_last: bool) -> _Stored | None:
    """Tensors whose first dim runs along the rows, and factors that are one for the weight.

    The rows are full steps, but for those of the last weight.
    """
    found: dict[str, tuple[Tensor, int | None]] = {}
    rows = part.held.local_shape[0]
    for stored in part.packing.tensors:
        tensor, along = part.tensors[stored.name], [dim.of for dim in stored.dims]
        if along[:1] == [0] and 0 not in along[1:]:
            step = stored.dims[0].step
            if len(tensor) != math.ceil(rows / step) or (rows % step and not is_last):
                return None
            found[stored.name] = tensor, step
        elif len(along) < 2 and set(along) <= {None}:
            found[stored.name] = tensor, None
        else:
            return None
    return found


def _by_blocks(part: Part, is_last: bool) -> _Stored | None:
    """Codes and factors, where a weight is full blocks; factors of factors are multiplied out."""
    key = next(name for name in part.tensors if ".quant_state." in name)
    blocks = Blocks.of(part.tensors[key])
    if math.prod(part.held.local_shape) % blocks.size:
        return None
    factors = block_factors(part.tensors, blocks, part.held)
    return {
        "*": (part.tensors["*"], 1),
        "*.absmax": (factors.reshape(part.tensors["*.absmax"].shape), blocks.size),
        "*.quant_map": (part.tensors["*.quant_map"], None),
        key: (plain_state(blocks), None),
    }


def _with_factors_of_rows(part: Part, is_last: bool) -> _Stored | None:
    """What the kernel takes: values, and a factor for each row."""
    values, scale = part.tensors["*"], part.tensors["*_scale"].reshape(-1, 1)
    return {"*": (values, 1), "*_scale": (scale.expand(len(values), 1), 1)}


_BY_ROWS: dict[str, Callable[[Part, bool], _Stored | None]] = {
    "bnb_4bit": _by_blocks,
    "bnb_8bit": _by_dims,
    "compressed_tensors": _with_factors_of_rows,
    "fp8": _by_dims,
    "torchao": _by_dims,
}
"""By the method of the packing; they get a part, and whether it is the last one."""
