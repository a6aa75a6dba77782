"""Packed parameters of a rank out of their stored tensors."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import torch
from torch import Tensor

from ..format.packed_layout import tensor_name
from ..format.plan import Packing, Plan, global_shape, parameter_plans
from ..format.slices import ranges
from ..packed.dequantize import check_values, dequantize
from ..packed.held import Held


def dequantized(
    stored: Generator[tuple[str, Tensor]], plan: Plan, rank: int
) -> Generator[tuple[str, Tensor]]:
    """The parameters of a rank, packed ones dequantized once all of their tensors were read.

    Args:
        stored: local tensors by the names under which they are stored; it is closed.
        plan: how each parameter is laid out.
        rank: whose tensors these are.

    Yields:
        Names and local tensors of parameters, in the plan's dtypes where they were packed.

    Raises:
        CheckpointError: a scale or an index is none that the format can have.
    """
    owners: dict[str, tuple[str, str]] = {}
    packings: dict[str, Packing] = {}
    for name, entry in parameter_plans(plan).items():
        if entry.packing is not None:
            packings[name] = entry.packing
            owners |= {tensor_name(name, t.name): (name, t.name) for t in entry.packing.tensors}
    waiting: dict[str, dict[str, Tensor]] = {}
    with closing(stored) as found:
        for stored_name, tensor in found:
            if stored_name not in owners:
                yield stored_name, tensor
                continue
            name, part = owners[stored_name]
            parts = waiting.setdefault(name, {})
            parts[part] = tensor
            if len(parts) == len(packings[name].tensors):
                del waiting[name]
                held = held_part(plan, name, rank)
                check_values(packings[name], parts, held, name)
                dtype = getattr(torch, parameter_plans(plan)[name].dtype)
                yield name, dequantize(packings[name], parts, held, dtype)


def held_part(plan: Plan, name: str, rank: int) -> Held:
    """Which part of a parameter a rank holds."""
    entry = parameter_plans(plan)[name]
    return Held(global_shape(entry), tuple(ranges(dim, plan.mesh, rank) for dim in entry.dims))
