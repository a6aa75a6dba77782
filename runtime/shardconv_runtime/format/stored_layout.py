"""The positions of tensors that ranks hold: in files, also of packed parameters, and in sums of gradients."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from ..errors import PlanError
from .dims import Dim, Leaf, Product, Sum, axes_of, leaves, segments, size, to_text
from .names import expand_all
from .plan import WHOLE, Packing, ParameterPlan, Plan, by_name
from .slices import Mesh, Range, coordinates, local_segments, ranges
from .stage_names import own_parameters


def packed_entries(entry: ParameterPlan) -> Iterator[ParameterPlan]:
    """Yield the stored tensors of a packed parameter, each as its own entry."""
    assert entry.packing is not None
    for tensor in entry.packing.tensors:
        names = tuple(tensor_name(name, tensor.name) for name in entry.names)
        dims = tuple(
            Leaf(dim.step) if dim.of is None else stepped(entry.dims[dim.of], dim.step) for dim in tensor.dims
        )
        yield ParameterPlan(names, dims, tensor.dtype, reason=entry.reason)


def tensor_name(parameter: str, name: str) -> str:
    """Return the name of a stored tensor next to a parameter, for FQNs or for patterns."""
    owner, dot, attribute = parameter.rpartition(".")
    return owner + dot + name.replace(WHOLE, attribute)


def granularity(packing: Packing, num_dims: int) -> tuple[int, ...]:
    """Return the steps in which each dim of the weight may be cut, so that each stored tensor can be, too."""
    steps = [1] * num_dims
    for tensor in packing.tensors:
        for dim in tensor.dims:
            if dim.of is not None:
                steps[dim.of] = math.lcm(steps[dim.of], dim.step)
    return tuple(steps)


def check_packing(entry: ParameterPlan, mesh: Mesh) -> None:
    """Check that each rank's part of a packed parameter begins and ends between the steps of its tensors."""
    assert entry.packing is not None
    for tensor in entry.packing.tensors:
        for dim in tensor.dims:
            along = None if dim.of is None else entry.dims[dim.of]
            if along is not None and not is_sharded_between(along, dim.step, mesh):
                raise PlanError(
                    f"{entry.names[0]}: dim {to_text(along)} is sharded inside of the {dim.step} positions "
                    f"for which {tensor.name} ({entry.packing.method}) has one"
                )


def is_sharded_between(dim: Dim, step: int, mesh: Mesh) -> bool:
    """Return whether each rank's part of a dim, and each of its segments, begins and ends between steps."""
    steps = stepped(dim, step)
    extent = size(dim)
    if size(steps) != math.ceil(extent / step):
        return False
    for rank in range(math.prod(mesh)):
        spans = ranges(steps, mesh, rank)
        if tuple((a * step, min(b * step, extent)) for a, b in spans) != ranges(dim, mesh, rank):
            return False
    return True


def stepped(dim: Dim, step: int) -> Dim:
    """Return a dim of one position per ``step`` of another; see ``is_sharded_between`` for its shards."""
    if step == 1:
        return dim
    if any(_divided(segment, step) is None for segment in segments(dim)):
        parts = [_blocks(segment, step) for segment in segments(dim)]
    else:
        parts = [part for segment in segments(dim) if (part := _divided(segment, step)) is not None]
    return parts[0] if len(parts) == 1 else Sum(tuple(parts))


def _divided(dim: Dim, step: int) -> Dim | None:
    """Return the dim without its innermost ``step`` positions; None if these are not a factor of it."""
    factors: list[Dim] = [dim]
    while step > 1 and factors:
        inner = factors.pop()
        if isinstance(inner, Product):
            factors.extend(inner.factors)
        elif isinstance(inner, Leaf) and step % inner.size == 0 and not inner.axes:
            step //= inner.size
        elif isinstance(inner, Leaf) and inner.size % step == 0:
            factors.append(Leaf(inner.size // step, inner.axes))
            step = 1
        else:
            return None
    if step > 1:
        return None
    return factors[0] if len(factors) == 1 else Product(tuple(factors) or (Leaf(1),))


def _blocks(segment: Dim, step: int) -> Dim:
    axes = dict.fromkeys(axis for leaf in leaves(segment) for axis in leaf.axes)
    return Leaf(math.ceil(size(segment) / step), tuple(axes))


def layout_sha256(plan: Plan) -> str:
    """Return the sha256 (hex) of tp, stage, ties and each tensor's name, dtype, shape and positions.

    It covers the contents of the files and nothing else: a plan that was solved again for other model code
    has the same hash if each rank's positions of each tensor are the same, and then keeps the files.
    """
    digest = hashlib.sha256(f"shardconv layout 1\ntp {plan.tp}\n".encode())
    if plan.stages is not None and plan.stages.own is not None:
        digest.update(f"stage {plan.stages.own} of {plan.stages.count}\n".encode())
    lines = [f"{alias} = {name}\n" for alias, name in plan.tied]
    for parameter in stored_entries(plan):
        shape = ",".join(str(size(dim)) for dim in parameter.dims)
        positions = "common"
        if not is_common(parameter):
            positions_digest = hashlib.sha256()
            for rank in range(math.prod(plan.mesh)):
                spans = [ranges(dim, plan.mesh, rank) for dim in parameter.dims]
                positions_digest.update(
                    f"{rank} {holds_values(parameter, plan.mesh, rank)} {spans}\n".encode()
                )
            positions = positions_digest.hexdigest()
        text = f"{parameter.dtype} [{shape}] {positions}"
        lines += [f"{name} {text}\n" for name in expand_all(parameter.names)]
    for line in sorted(lines):
        digest.update(line.encode())
    return digest.hexdigest()


def is_common(parameter: ParameterPlan) -> bool:
    """Return whether the tensor is replicated over all ranks, and so stored once, for all of them."""
    return not parameter.partial and not any(axes_of(dim) for dim in parameter.dims)


def holds_values(parameter: ParameterPlan, mesh: Mesh, rank: int) -> bool:
    """Return whether ``rank`` holds a Partial tensor's values (coordinate 0 on its axes), not zeros."""
    coords = coordinates(mesh, rank)
    return all(coords[axis] == 0 for axis in parameter.partial)


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
    """Return the plan entries of the tensors in the files, keyed by the names of the tensors."""
    return by_name("parameters", tuple(stored_entries(plan)))


@dataclass(frozen=True, slots=True)
class GradSum:
    """Positions of a local tensor, ranges in each dim, and the mesh axes over which gradients are summed."""

    axes: tuple[int, ...]
    positions: tuple[tuple[Range, ...], ...]
    is_full: bool


def sums(entry: ParameterPlan, mesh: Mesh, rank: int, axes: Iterable[int]) -> tuple[GradSum, ...]:
    """Return the sums that a parameter's local gradient needs, which is Partial over ``axes``.

    The positions of a sum are replicated along its axes.
    """
    summed_axes = {a for a in axes if mesh[a] > 1}
    if not summed_axes:
        return ()
    dims = [by_axes(dim, mesh, rank) for dim in entry.dims]
    cells = list(product(*(each.items() for each in dims)))
    gradient_sums = []
    for cell in cells:
        left = tuple(sorted(summed_axes.difference(*(sharded for sharded, _ in cell))))
        if left:
            gradient_sums.append(GradSum(left, tuple(spans for _, spans in cell), len(cells) == 1))
    return tuple(sorted(gradient_sums, key=lambda each: (each.axes, each.positions)))


def by_axes(dim: Dim, mesh: Mesh, rank: int) -> dict[frozenset[int], tuple[Range, ...]]:
    """Return the ranges of local positions of a dim, by the axes over which they are sharded."""
    out: dict[frozenset[int], tuple[Range, ...]] = {}
    for span, sharded in local_segments(dim, mesh, rank):
        out[sharded] = (*out.get(sharded, ()), span)
    return out
