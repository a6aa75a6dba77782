"""The stored form of a loaded model: its present tensors by FQN, and the plan of their layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import PlanError, RefusedCallError, missing
from ..format.header import STORED_NAME, dtype_name
from ..format.names import grouped
from ..format.plan import ParameterPlan, Plan, global_shape, local_shape, parameter_plans
from ..loaded import loaded, unwrapped
from ..parallel.build import stored_tensors

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of parameters' names that ``torch.compile`` and activation checkpointing add."""


@dataclass(frozen=True)
class StoredModel:
    """One rank's tensors, and their layout."""

    plan: Plan
    """The plan of this process's parameters, with the present dtypes of the tensors, and without packings."""
    tensors: dict[str, Tensor]
    """Local, by FQN, each parameter and persistent buffer once. The shape of a DTensor, which is sharded over
    data-parallel processes, is local to the rank too."""


def stored_model(model: nn.Module) -> StoredModel:
    """Find the tensors to store of a model. No collective runs."""
    source = loaded(model)
    if source.packed:
        raise RefusedCallError(
            "the model's weights are packed, and are not saved out of the modules of their format; copy "
            f"{source.directory}, or load it with dequantize=True"
        )
    tensors, plan = named_tensors(model), source.held_plan
    for alias, stored in plan.tied:
        if alias in tensors and tensors[alias] is not tensors.get(stored):
            raise RefusedCallError(
                f"{alias} and {stored} were tied when the model was loaded, and are two tensors now; tie "
                "them again, or convert a model where they are not tied"
            )
    aliases = dict(plan.tied)
    entries = parameter_plans(plan)
    stored_tensors = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    sides = [("the plan", entries.keys()), ("the model", stored_tensors.keys())]
    for (owner, present), (holder, names_of_holder) in (sides, sides[::-1]):
        if names := present - names_of_holder:
            raise PlanError(
                f"{missing(names, 'tensor', owner, holder)}; undo the changes that add or remove parameters "
                "(e.g. merge adapters)"
            )
    for name, entry in entries.items():
        tensor, shape = stored_tensors[name], local_shape(entry, plan.mesh, source.rank)
        if tuple(tensor.shape) != shape:
            raise RefusedCallError(
                f"{name} has shape {tuple(tensor.shape)}, and in the plan rank {source.rank} holds {shape}"
            )
        if tensor.is_meta:
            raise RefusedCallError(f"{name} is on the meta device, so it has no values to save")
        if (dtype := dtype_name(tensor.dtype)) not in STORED_NAME:
            raise RefusedCallError(f"{name} is {dtype}, which safetensors cannot store; cast it first")
    return StoredModel(
        with_dtypes(plan, dtypes_of(stored_tensors)), {name: stored_tensors[name] for name in entries}
    )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return local parameters and persistent buffers by FQNs of the plan, tied ones under each."""
    return {_fqn(name): tensor for name, tensor in stored_tensors(unwrapped(model))}


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by the FQNs of the plan, shared ones under each of their names."""
    return {_fqn(name): module for name, module in unwrapped(model).named_modules(remove_duplicate=False)}


def _fqn(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def dtypes_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of the dtypes of tensors."""
    return {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}


def with_dtypes(plan: Plan, dtypes: Mapping[str, str]) -> Plan:
    """Return the plan with these dtypes of its parameters, by name, and without packings."""
    parameters: list[ParameterPlan] = []
    for entry in plan.parameters:  # one for each dtype among the names of an entry
        kinds = grouped(entry.names, dtypes.__getitem__)
        split = (replace(entry, names=names, dtype=d, packing=None) for d, names in kinds.items())
        parameters += [entry] if kinds.keys() == {entry.dtype} and entry.packing is None else split
    # The dtype of most elements among the tensors that had the model's own dtype.
    counts: Counter[str] = Counter()
    for name, entry in parameter_plans(plan).items():
        if entry.dtype == plan.model.dtype and getattr(torch, dtypes[name]).is_floating_point:
            counts[dtypes[name]] += 1 + math.prod(global_shape(entry))
    dtype = counts.most_common(1)[0][0] if counts else plan.model.dtype
    return replace(plan, model=replace(plan.model, dtype=dtype), parameters=tuple(parameters))
