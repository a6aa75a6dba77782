"""Plans of quantized checkpoints: the plan of the unquantized model with the packings of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import PlanError, SourceError
from ..format.dims import axes_of
from ..format.names import grouped
from ..format.plan import Packing, ParameterPlan, Plan, global_shape, local_shape, parameter_plans
from ..format.slices import Mesh, ranges
from ..format.stored_layout import check_packing, granularity, holds_values, tensor_name
from ..packed.formats import scales_tokens
from .lazy_tensor import LazyTensor, cast, take, zeros
from .quantized import PackedWeight

# A rank's local part of the weights of an ordinary checkpoint, as a plan shards them.


def as_planned(name: str, entry: ParameterPlan, tensor: LazyTensor) -> LazyTensor:
    """Return a global weight, cast to the plan's dtype."""
    if tensor.shape != global_shape(entry):
        raise SourceError(
            f"{name} is {list(tensor.shape)} in the checkpoint and {list(global_shape(entry))} "
            "in the plan; plan it again from the config.json that belongs to these weights"
        )
    planned = cast(tensor, entry.dtype)
    if planned is None:
        raise SourceError(f"{name} is cast to {tensor.dtype} when loaded, and {entry.dtype} in the plan")
    return planned


def shard(entry: ParameterPlan, tensor: LazyTensor, mesh: Mesh, rank: int) -> LazyTensor:
    """Return the local part of a parameter on a rank; zeros of a Partial one, except on the first ranks."""
    if not holds_values(entry, mesh, rank):
        return zeros(entry.dtype, local_shape(entry, mesh, rank))
    for index, dim in enumerate(entry.dims):
        tensor = take(tensor, index, ranges(dim, mesh, rank))
    return tensor


Packings = Mapping[str, Packing]
"""How packed parameters are stored, by FQN."""


def flatten(
    plan: Plan, weights: Mapping[str, LazyTensor | PackedWeight]
) -> tuple[Plan, dict[str, LazyTensor]]:
    """Return the plan with packings, and all tensors to store by their names."""
    flat: dict[str, LazyTensor] = {}
    packings = {}
    for name, weight in weights.items():
        if isinstance(weight, LazyTensor):
            flat[name] = weight
        else:
            packings[name] = weight.packing
            flat |= {tensor_name(name, part): tensor for part, tensor in weight.tensors.items()}
    return with_packings(plan, packings), flat


def with_packings(plan: Plan, packings: Packings) -> Plan:
    """Return a plan whose parameters are stored packed."""
    if not packings:
        return plan
    parameters: list[ParameterPlan] = []
    for entry in plan.parameters:  # one for each packing among the names of an entry
        kinds = grouped(entry.names, packings.get)
        split = (replace(entry, names=names, packing=kind) for kind, names in kinds.items())
        parameters += [entry] if kinds.keys() == {None} else split
    try:
        for entry in parameters:
            if entry.packing is not None:
                check_packing(entry, plan.mesh)
    except PlanError as error:
        raise PlanError(
            f"{error}; choose another tp than {plan.tp}, or pass --dtype to convert the model dequantized"
        ) from error
    return replace(plan, parameters=tuple(parameters))


def grains_of(weights: Mapping[str, LazyTensor | PackedWeight]) -> dict[str, tuple[int, ...]]:
    """Return the grains of each packed weight of a checkpoint for each dim."""
    return {
        name: granularity(weight.packing, len(weight.shape))
        for name, weight in weights.items()
        if not isinstance(weight, LazyTensor)
    }


def planned_grains(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the grains of each packed parameter of a plan for each dim."""
    return {
        name: granularity(entry.packing, len(entry.dims))
        for name, entry in parameter_plans(plan).items()
        if entry.packing is not None
    }


def packings_of(plan: Plan) -> dict[str, Packing]:
    """Return the packings of a plan's parameters, to be used in another plan of the same model."""
    return {name: e.packing for name, e in parameter_plans(plan).items() if e.packing is not None}


def with_packed_notes(plan: Plan, settings: Mapping[str, Any] | None) -> Plan:
    """Return a plan with notes about packed weights; it is verified with dequantized ones."""
    entries = [entry for entry in parameter_plans(plan).values() if entry.packing is not None]
    count = sum(bool(axes_of(entry.dims[-1])) for entry in entries)
    if settings is None or not count or not scales_tokens(settings):
        return plan
    note = (
        f"activations are quantized token by token: in {count} packed weights whose inputs are sharded, each "
        "rank sees the largest value of its own part, so that results differ from those of the unsharded "
        "quantized model by about the error of that quantization"
    )
    return replace(plan, notes=(*plan.notes, note))
