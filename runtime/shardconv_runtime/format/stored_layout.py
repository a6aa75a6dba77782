"""The tensors in the files of a plan, and a hash of each rank's positions, which binds shards to their plan.

The hash covers the contents of the files and nothing else: a plan that was solved again for other model code
has the same hash where each rank's positions of each tensor are the same, and then keeps the files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace

from .dims import Dim, Leaf, Sum, axes_of, leaves, segments, size
from .names import expand_all
from .plan import ParameterPlan, Plan, by_name
from .slices import Mesh, coordinates, ranges

SUFFIX = "_scale_inv"


def layout_sha256(plan: Plan) -> str:
    """sha256 (hex) over tp, ties, and each tensor's name, dtype, shape and positions on each rank."""
    digest = hashlib.sha256(f"shardconv layout 1\ntp {plan.tp}\n".encode())
    lines = [f"{alias} = {name}\n" for alias, name in plan.tied]
    for parameter in stored_entries(plan):
        text = _describe(parameter, plan.mesh)
        lines += [f"{name} {text}\n" for name in expand_all(parameter.names)]
    for line in sorted(lines):
        digest.update(line.encode())
    return digest.hexdigest()


def is_common(parameter: ParameterPlan) -> bool:
    """Whether the tensor is replicated over all ranks, and so stored once, for all of them."""
    return not parameter.partial and not any(axes_of(dim) for dim in parameter.dims)


def holds_values(parameter: ParameterPlan, mesh: Mesh, rank: int) -> bool:
    """Whether ``rank`` holds a Partial tensor's values (coordinate 0 on its axes), not zeros."""
    coords = coordinates(mesh, rank)
    return all(coords[axis] == 0 for axis in parameter.partial)


def _describe(parameter: ParameterPlan, mesh: Mesh) -> str:
    shape = ",".join(str(size(dim)) for dim in parameter.dims)
    positions = "common" if is_common(parameter) else _positions(parameter, mesh)
    return f"{parameter.dtype} [{shape}] {positions}"


def _positions(parameter: ParameterPlan, mesh: Mesh) -> str:
    digest = hashlib.sha256()
    for rank in range(math.prod(mesh)):
        held = holds_values(parameter, mesh, rank)
        spans = [ranges(dim, mesh, rank) for dim in parameter.dims]
        digest.update(f"{rank} {held} {spans}\n".encode())
    return digest.hexdigest()


def stored_entries(plan: Plan) -> Iterator[ParameterPlan]:
    """The tensors in the files: the parameters, each followed by its factors if it has blocks."""
    for entry in plan.parameters:
        yield entry
        if entry.block:
            yield factors_entry(entry)


def stored_plans(plan: Plan) -> dict[str, ParameterPlan]:
    """The entry of each tensor in the files by its name.

    Raises:
        PlanError: two entries claim one name, or the patterns stand for too many names.
    """
    return by_name("parameters", tuple(stored_entries(plan)))


def factors_entry(entry: ParameterPlan) -> ParameterPlan:
    """How the factors of a parameter with blocks are laid out."""
    dims = tuple(map(block_dim, entry.dims, entry.block))
    names = tuple(name + SUFFIX for name in entry.names)
    return replace(entry, names=names, dims=dims, dtype=entry.block_dtype, block=(), block_dtype="")


def block_dim(dim: Dim, block: int) -> Dim:
    """The blocks of a dim, as a dim; sharded alike only where ``check_blocks`` accepts the dim."""
    if block == 1:
        return dim
    blocks = []
    for segment in segments(dim):
        axes = dict.fromkeys(axis for leaf in leaves(segment) for axis in leaf.axes)
        blocks.append(Leaf(math.ceil(size(segment) / block), tuple(axes)))
    return blocks[0] if len(blocks) == 1 else Sum(tuple(blocks))
