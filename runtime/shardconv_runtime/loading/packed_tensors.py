"""Packed parameters of a rank out of their stored tensors."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..format.packed_layout import tensor_name
from ..format.plan import ParameterPlan, Plan, global_shape, parameter_plans
from ..format.slices import Mesh, ranges
from ..packed.dequantize import check_values, dequantize
from ..packed.held import WeightSlice

if TYPE_CHECKING:
    from ..parallel.packed_modules import PackedModules


def unpacked(
    stored: Generator[tuple[str, Tensor]], plan: Plan, rank: int, modules: PackedModules | None = None
) -> Generator[tuple[str, Tensor]]:
    """The parameters of a rank; packed ones, once all of their tensors were read, go to their modules.

    Args:
        stored: local tensors by the names under which they are stored; it is closed.
        plan: how each parameter is laid out.
        rank: whose tensors these are.
        modules: take packed parameters as they are stored; without them these are dequantized.

    Yields:
        Names and local tensors of plain parameters, and of dequantized ones in the plan's dtypes.

    Raises:
        CheckpointError: a scale or an index is none that the format can have, or a tensor is missing.
    """
    entries = parameter_plans(plan)
    owners = {
        tensor_name(name, tensor.name): (name, entry.packing, tensor.name)
        for name, entry in entries.items()
        if entry.packing is not None
        for tensor in entry.packing.tensors
    }
    waiting: dict[str, dict[str, Tensor]] = {}
    with closing(stored) as found:
        for stored_name, tensor in found:
            if stored_name not in owners:
                yield stored_name, tensor
                continue
            name, packing, part = owners[stored_name]
            parts = waiting.setdefault(name, {})
            parts[part] = tensor
            if len(parts) < len(packing.tensors):
                continue
            del waiting[name]
            held = held_part(entries[name], plan.mesh, rank)
            check_values(packing, parts, held, name)
            if modules is not None:
                modules.fill(name, parts, held)
            else:
                yield name, dequantize(packing, parts, held, getattr(torch, entries[name].dtype))
    if waiting:
        raise CheckpointError(f"{min(waiting)}: the files have some of its stored tensors, and not all")


def held_part(entry: ParameterPlan, mesh: Mesh, rank: int) -> WeightSlice:
    """Which part of a parameter a rank holds."""
    return WeightSlice(global_shape(entry), tuple(ranges(dim, mesh, rank) for dim in entry.dims))
