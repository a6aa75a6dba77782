"""How the stored tensors of a packed parameter are laid out: as the weight is, in their own steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from ..errors import PlanError
from .dims import MAX_SIZE, Dim, Leaf, Product, Sum, leaves, segments, size, to_text
from .names import FORBIDDEN
from .plan import PackedTensor, Packing, ParameterPlan, global_shape
from .plan_checks import MAX_STEP_LENGTH, MAX_TENSOR_DIMS, check_dtype, fail
from .slices import Mesh, Range, ranges

WHOLE = "*"
"""In the name of a stored tensor: the parameter's own name."""


def packed_entries(entry: ParameterPlan) -> Iterator[ParameterPlan]:
    """The stored tensors of a packed parameter, each as an entry of its own."""
    assert entry.packing is not None
    for tensor in entry.packing.tensors:
        yield _entry(entry, tensor)


def _entry(entry: ParameterPlan, tensor: PackedTensor) -> ParameterPlan:
    names = tuple(tensor_name(name, tensor.name) for name in entry.names)
    dims = tuple(
        Leaf(dim.step) if dim.of is None else stepped(entry.dims[dim.of], dim.step) for dim in tensor.dims
    )
    return ParameterPlan(names, dims, tensor.dtype, reason=entry.reason)


def tensor_name(parameter: str, name: str) -> str:
    """The name of a stored tensor beside a parameter, of FQNs or of patterns.

    Args:
        parameter: FQN or pattern.
        name: of the tensor in a ``Packing``.
    """
    owner, dot, own = parameter.rpartition(".")
    return owner + dot + name.replace(WHOLE, own)


def granularity(packing: Packing, num_dims: int) -> tuple[int, ...]:
    """The steps in which each dim of the weight may be cut, so that each stored tensor can be, too."""
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
    return size(steps) == math.ceil(size(dim) / step) and all(
        _positions(ranges(steps, mesh, rank), step, size(dim)) == ranges(dim, mesh, rank)
        for rank in range(math.prod(mesh))
    )


def _positions(spans: tuple[Range, ...], step: int, extent: int) -> tuple[Range, ...]:
    return tuple((start * step, min(stop * step, extent)) for start, stop in spans)


def stepped(dim: Dim, step: int) -> Dim:
    """A dim of one position for each ``step`` of another one; sharded alike only where
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


# The rules of packed parameters in a plan.

MAX_TENSORS = 16
"""Most stored tensors of a packed parameter, and most settings."""


def check_packings(entries: Iterable[ParameterPlan], mesh: Mesh) -> None:
    """Check how parameters are packed.

    Raises:
        MalformedError: a rule is broken; the message begins with the path of the field.
        PlanError: a rank's part begins or ends inside of a step.
    """
    for index, entry in enumerate(entries):
        if entry.packing is not None:
            _check_packing(f"parameters[{index}].packing", entry, entry.packing, mesh)


def _check_packing(where: str, entry: ParameterPlan, packing: Packing, mesh: Mesh) -> None:
    if entry.partial:
        fail(where, "a packed parameter cannot be Partial: its zeros cannot be stored")
    if any(name.endswith("}") for name in entry.names):
        fail(where, "a packed parameter has a name of its own in its module, not a number")
    if not packing.method or len(packing.method) > MAX_STEP_LENGTH:
        fail(f"{where}.method", f"must have 1 to {MAX_STEP_LENGTH} characters")
    if not 1 <= len(packing.tensors) <= MAX_TENSORS:
        fail(f"{where}.tensors", f"must be 1 to {MAX_TENSORS}")
    if len(packing.settings) > MAX_TENSORS or any(len(k) > MAX_STEP_LENGTH for k, _ in packing.settings):
        fail(
            f"{where}.settings",
            f"more than {MAX_TENSORS}, or a name of more than {MAX_STEP_LENGTH} characters",
        )
    for index, tensor in enumerate(packing.tensors):
        _check_tensor(f"{where}.tensors[{index}]", tensor, global_shape(entry))
    names = [tensor.name for tensor in packing.tensors]
    if len(set(names)) < len(names):
        fail(f"{where}.tensors", "two of them have one name")
    check_packing(entry, mesh)


def _check_tensor(where: str, tensor: PackedTensor, shape: tuple[int, ...]) -> None:
    check_dtype(f"{where}.dtype", tensor.dtype)
    components = tensor.name.replace(WHOLE, "x").split(".")
    if "" in components or FORBIDDEN.search(tensor.name) or len(tensor.name) > MAX_STEP_LENGTH:
        fail(f"{where}.name", "is no name of a tensor in a module")
    if len(tensor.dims) > MAX_TENSOR_DIMS or len(tensor.checkpoint_shape) > MAX_TENSOR_DIMS:
        fail(f"{where}.dims", f"more than {MAX_TENSOR_DIMS} dims")
    sizes = []
    for index, dim in enumerate(tensor.dims):
        if not (0 if dim.of is None else 1) <= dim.step <= MAX_SIZE:
            fail(f"{where}.dims[{index}].step", f"must be 1 to {MAX_SIZE}")
        if dim.of is not None and not 0 <= dim.of < len(shape):
            fail(f"{where}.dims[{index}].of", f"the weight has {len(shape)} dims")
        sizes.append(dim.step if dim.of is None else math.ceil(shape[dim.of] / dim.step))
    along = [dim.of for dim in tensor.dims if dim.of is not None]
    if len(set(along)) < len(along):
        fail(f"{where}.dims", "two of them run along one dim of the weight")
    if tensor.checkpoint_shape and math.prod(tensor.checkpoint_shape) != math.prod(sizes):
        fail(f"{where}.checkpoint_shape", f"has not as many elements as {sizes}")
