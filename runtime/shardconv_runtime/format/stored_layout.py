"""The tensors in the files of a plan, and a hash of each rank's positions, which binds shards to their plan.

The hash covers the contents of the files and nothing else: a plan that was solved again for other model code
has the same hash where each rank's positions of each tensor are the same, and then keeps the files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

from .dims import axes_of, size
from .names import expand_all
from .packed_layout import packed_entries
from .plan import ParameterPlan, Plan, by_name
from .slices import Mesh, coordinates, ranges
from .staged_names import own_parameters


def layout_sha256(plan: Plan) -> str:
    """sha256 (hex) over tp, the stage, ties, and each tensor's name, dtype, shape and positions on ranks."""
    digest = hashlib.sha256(f"shardconv layout 1\ntp {plan.tp}\n".encode())
    if plan.stages is not None and plan.stages.own is not None:
        digest.update(f"stage {plan.stages.own} of {plan.stages.count}\n".encode())
    lines = [f"{alias} = {name}\n" for alias, name in plan.tied]
    for parameter in stored_entries(plan):
        shape = ",".join(str(size(dim)) for dim in parameter.dims)
        positions = "common" if is_common(parameter) else _positions(parameter, plan.mesh)
        text = f"{parameter.dtype} [{shape}] {positions}"
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


def _positions(parameter: ParameterPlan, mesh: Mesh) -> str:
    digest = hashlib.sha256()
    for rank in range(math.prod(mesh)):
        held = holds_values(parameter, mesh, rank)
        spans = [ranges(dim, mesh, rank) for dim in parameter.dims]
        digest.update(f"{rank} {held} {spans}\n".encode())
    return digest.hexdigest()


def stored_entries(plan: Plan) -> Iterator[ParameterPlan]:
    """Yield the tensors in the files: parameters, and the stored tensors of packed ones.

    In the directory of a stage, these are the tensors of that stage."""
    parameters = plan.parameters
    if plan.stages is not None and plan.stages.own is not None:
        parameters = own_parameters(plan, plan.stages.own)
    for entry in parameters:
        if entry.packing is None:
            yield entry
        else:
            yield from packed_entries(entry)


def stored_plans(plan: Plan) -> dict[str, ParameterPlan]:
    """Return the entry of each tensor in the files by its name.

    Raises:
        PlanError: two entries claim one name, or the patterns expand to too many names.
    """
    return by_name("parameters", tuple(stored_entries(plan)))
