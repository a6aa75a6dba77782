"""The rules of packed parameters in a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .dims import MAX_SIZE
from .names import FORBIDDEN
from .packed_layout import WHOLE, check_packing
from .plan import PackedTensor, Packing, ParameterPlan, global_shape
from .plan_checks import MAX_STEP_LENGTH, MAX_TENSOR_DIMS, check_dtype, fail
from .slices import Mesh

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
    _check_settings(where, packing)
    for index, tensor in enumerate(packing.tensors):
        _check_tensor(f"{where}.tensors[{index}]", tensor, global_shape(entry))
    names = [tensor.name for tensor in packing.tensors]
    if len(set(names)) < len(names):
        fail(f"{where}.tensors", "two of them have one name")
    check_packing(entry, mesh)


def _check_settings(where: str, packing: Packing) -> None:
    if not packing.method or len(packing.method) > MAX_STEP_LENGTH:
        fail(f"{where}.method", f"must have 1 to {MAX_STEP_LENGTH} characters")
    if not 1 <= len(packing.tensors) <= MAX_TENSORS:
        fail(f"{where}.tensors", f"must be 1 to {MAX_TENSORS}")
    if len(packing.settings) > MAX_TENSORS or any(len(k) > MAX_STEP_LENGTH for k, _ in packing.settings):
        fail(
            f"{where}.settings",
            f"more than {MAX_TENSORS}, or a name of more than {MAX_STEP_LENGTH} characters",
        )


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
