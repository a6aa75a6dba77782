"""Joins the stored tensors of several packed weights to the tensors of one weight, which has the rows of all.

Each weight keeps its part of the memory. Formats that pack columns first (GPTQ, AWQ) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..packed.formats import format_of
from ..packed.packed_format import Part, Rows
from ..packed.stored_weights import WeightSlice
from .fused_products import joined


def joined_parts(parts: Sequence[Part]) -> tuple[Part, list[Part]] | None:
    """Return a part with the rows of all parts, and these, which share its memory; None if not exact."""
    methods = {part.packing.method for part in parts}
    packed_format = format_of(methods.pop())
    if methods or not packed_format.can_be_joined or len({part.held.local_shape[1:] for part in parts}) > 1:
        return None
    stored: list[Rows] = []
    for index, part in enumerate(parts):
        rows = packed_format.rows(part, index == len(parts) - 1)
        if rows is None or rows.keys() != (stored or [rows])[0].keys():
            return None
        stored.append(rows)
    if not all(_are_alike([rows[name] for rows in stored]) for name in stored[0]):
        return None
    whole: dict[str, Tensor] = {}
    by_part = [dict(part.tensors) for part in parts]
    for name, (first, step) in stored[0].items():
        if step is None:
            whole[name] = first
            continue
        whole[name], shared = joined([rows[name][0] for rows in stored])
        for tensors, rows, tensor in zip(by_part, stored, shared, strict=True):
            if tensors[name].data_ptr() == rows[name][0].data_ptr():  # others were computed
                tensors[name] = tensor
    shapes = [part.held.local_shape for part in parts]
    joined_slice = WeightSlice.whole((sum(shape[0] for shape in shapes), *shapes[0][1:]))
    spanning = replace(parts[0], tensors=whole, held=joined_slice)
    return spanning, [replace(part, tensors=each) for part, each in zip(parts, by_part, strict=True)]


def _are_alike(stored: Sequence[tuple[Tensor, int | None]]) -> bool:
    first, step = stored[0]
    if len({(tensor.dtype, tensor.device, tensor.shape[1:], each) for tensor, each in stored}) > 1:
        return False
    return step is not None or all(torch.equal(_bytes(first), _bytes(tensor)) for tensor, _ in stored[1:])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
