"""How the stored tensors of a packed parameter are laid out: as the weight is, in their own steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..errors import PlanError
from .dims import Dim, Leaf, Product, Sum, leaves, segments, size, to_text
from .plan import WHOLE, Packing, ParameterPlan
from .slices import Mesh, ranges


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
    """Return the name of a stored tensor next to a parameter, for FQNs or for patterns.

    Args:
        parameter: FQN or pattern.
        name: of the tensor in a ``Packing``.
    """
    owner, dot, own = parameter.rpartition(".")
    return owner + dot + name.replace(WHOLE, own)


def granularity(packing: Packing, num_dims: int) -> tuple[int, ...]:
    """Return the steps in which each dim of the weight may be cut, so that each stored tensor can be, too."""
    steps = [1] * num_dims
    for tensor in packing.tensors:
        for dim in tensor.dims:
            if dim.of is not None:
                steps[dim.of] = math.lcm(steps[dim.of], dim.step)
    return tuple(steps)


def check_packing(entry: ParameterPlan, mesh: Mesh) -> None:
    """Check that each rank's part of a packed parameter begins and ends between the steps of its tensors.

    Raises:
        PlanError: it does not in some dim.
    """
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
    """Whether each rank's part of a dim, and each of its segments, begins and ends between steps."""
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
    """Return a dim of one position for each ``step`` of another one; sharded alike only where
    ``is_sharded_between`` accepts the dim."""
    if step == 1:
        return dim
    if any(_divided(segment, step) is None for segment in segments(dim)):
        parts = [_blocks(segment, step) for segment in segments(dim)]
    else:
        parts = [part for segment in segments(dim) if (part := _divided(segment, step)) is not None]
    return parts[0] if len(parts) == 1 else Sum(tuple(parts))


def _divided(dim: Dim, step: int) -> Dim | None:
    """The dim without its innermost ``step`` positions; None where these are no factor of it."""
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
