"""A hash of where every byte of a model lies, which binds shard files to their plan.

It covers what the files hold and nothing else: a plan that was solved again for other model code has
the same hash where each rank's positions of each tensor are the same, and then keeps the files.
"""

from __future__ import annotations

import hashlib
import math

from .block_scales import stored_entries
from .dims import axes_of, size
from .names import expand_all
from .plan import ParameterPlan, Plan
from .slices import Mesh, coordinates, ranges


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
    """Every rank holds the tensor whole: it is stored once, for all of them."""
    return not parameter.partial and not any(axes_of(dim) for dim in parameter.dims)


def holds_values(parameter: ParameterPlan, mesh: Mesh, rank: int) -> bool:
    """Whether ``rank`` holds a Partial tensor's values (coordinate 0 on its axes), not zeros."""
    coords = coordinates(mesh, rank)
    return all(coords[axis] == 0 for axis in parameter.partial)


def _describe(parameter: ParameterPlan, mesh: Mesh) -> str:
    shape = ",".join(str(size(dim)) for dim in parameter.dims)
    place = "common" if is_common(parameter) else _places(parameter, mesh)
    return f"{parameter.dtype} [{shape}] {place}"


def _places(parameter: ParameterPlan, mesh: Mesh) -> str:
    digest = hashlib.sha256()
    for rank in range(math.prod(mesh)):
        held = holds_values(parameter, mesh, rank)
        spans = [ranges(dim, mesh, rank) for dim in parameter.dims]
        digest.update(f"{rank} {held} {spans}\n".encode())
    return digest.hexdigest()
