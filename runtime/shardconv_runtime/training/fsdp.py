"""Data parallelism beside tensor parallelism: FSDP2 over the other dims of the device mesh.

What ``fully_shard`` splits is this rank's part of a parameter; collectives of tensor parallelism and sums of
gradients over it run inside of the modules, on whole parts.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..comm import agreement
from ..comm.mesh import TP, Launch, control_group, tp_group
from ..errors import LaunchError, PlanError
from ..format.plan import parameter_plans
from ..format.plan_forms import of_sequence
from ..loaded import Loaded, loaded, unwrapped
from ..saving.stored_model import named_modules, named_tensors
from .repeated_layers import repeated_layers

MAX_DIMS = 2
"""Of a mesh beside tensor parallelism: replicas, and shards."""


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Split each layer's parameters, and what remains of the model's, over data-parallel processes.

    Every process calls it, before it makes its optimizer; if it raises on one, it raises on all. Parameters
    become DTensors over the other dims of the mesh than "tp"; gradients are averages over them.

    Args:
        model: of ``load(..., mesh=mesh, training=True)``.
        mesh: with a dim named "tp", over which the model was loaded, and one other dim (FSDP), or two: the
            first of replicas, the second of shards (HSDP).
        param_dtype: that layers compute in, ``torch.bfloat16`` say; by default that of the parameters.
        reduce_dtype: that gradients are averaged in; those of float64 parameters are in float64, unless
            ``param_dtype`` says otherwise.
        reshard_after_forward: free a layer's whole parameters after its forward pass, and gather them again
            for the backward pass; False takes more memory and fewer collectives.

    Returns:
        ``model``.

    Raises:
        PlanError: the model was not loaded for training, was split already, or has parameters that cannot be
            split: scalars, or of several dtypes in one layer.
        LaunchError: the mesh does not fit, or another process has an error.

    Example:
        >>> mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))
        >>> model = shardconv_runtime.load("out/", mesh=mesh, training=True)
        >>> shardconv_runtime.data_parallel(model, mesh, param_dtype=torch.bfloat16)
    """
    units: list[nn.Module] = []
    error: Exception | None = None
    try:
        source = loaded(model)
        _check_mesh(mesh, source.launch)
        units = _units(unwrapped(model), source)
    except Exception as failure:
        error = failure
    _agree(mesh, error)
    others = tuple(name for name in mesh.mesh_dim_names or () if name != TP)
    along = mesh[others if len(others) > 1 else others[0]]
    for unit in units:
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=_reduce_dtype(unit, param_dtype, reduce_dtype)
        )
        is_root = unit is units[-1]
        fully_shard(
            unit,
            mesh=along,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward and not is_root,  # its backward pass comes at once
        )
    return model


def _check_mesh(mesh: DeviceMesh, start: Launch) -> None:
    group = tp_group(mesh)
    names = mesh.mesh_dim_names or ()
    others = [name for name in names if name != TP]
    if not 1 <= len(others) <= MAX_DIMS:
        raise LaunchError(
            f"the mesh has the dims {names}; beside {TP!r} there must be one for data parallelism, or two "
            "(replicas, shards)"
        )
    found = dist.get_process_group_ranks(group)
    own = [dist.get_rank()] if start.group is None else dist.get_process_group_ranks(start.group)
    if found != own:
        raise LaunchError(
            f"the dim {TP!r} of the mesh has the processes {found}, and the model was loaded by {own}; pass "
            "the mesh to load, too"
        )


def _units(model: nn.Module, source: Loaded) -> list[nn.Module]:
    """What is wrapped, the model last. A layer whose parameters are used outside of it is left to the model.

    Raises:
        PlanError: see ``data_parallel``.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise PlanError("fully_shard has wrapped the model or a part of it already; call data_parallel once")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PlanError(
            "no parameter of the model requires a gradient: it was loaded for inference; load it with "
            "training=True"
        )
    users = _users(model, source)
    layers = repeated_layers(model)
    times = Counter(id(p) for layer in layers for p in layer.parameters())
    units = [
        layer
        for layer in layers
        if (inside := {id(module) for module in layer.modules()})
        and all(times[id(p)] == 1 and users[id(p)] <= inside for p in layer.parameters())
        and next(layer.parameters(), None) is not None
    ]
    _check_parameters(model, units)
    return [*units, model]


def _users(model: nn.Module, source: Loaded) -> dict[int, set[int]]:
    """By parameter, the modules that have it, and that exchange it while they run (``gates``)."""
    users: dict[int, set[int]] = {id(parameter): set() for parameter in model.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].add(id(module))
    tensors, modules = named_tensors(model), named_modules(model)
    plans = [source.plan]
    if source.plan.training is not None and source.plan.training.sequence is not None:
        plans.append(of_sequence(source.plan))
    for plan in plans:
        entries = parameter_plans(plan)
        for name, of in [(name, name) for name in entries] + list(plan.tied):
            around = ".".join(name.split(".")[: -1 - entries[of].grad_levels])
            if id(tensors.get(name)) in users:
                users[id(tensors[name])].add(id(modules[around]))
    return users


def _check_parameters(model: nn.Module, units: list[nn.Module]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise PlanError(f"{name} is a scalar, which fully_shard cannot split; make it one of shape [1]")
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside]
    for parameters in (*(list(unit.parameters()) for unit in units), rest):
        dtypes = {p.dtype for p in parameters if p.requires_grad}
        if len(dtypes) > 1:
            raise PlanError(
                f"a layer has parameters in {' and '.join(sorted(map(str, dtypes)))}, which fully_shard "
                'cannot reduce together; load the model with dtype="float32" (and pass param_dtype)'
            )


def _reduce_dtype(
    unit: nn.Module, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype
) -> torch.dtype | None:
    """None: the dtype of the gradients."""
    found = {param_dtype or p.dtype for p in unit.parameters() if p.requires_grad}
    return None if found == {torch.float64} else reduce_dtype


def _agree(mesh: DeviceMesh, error: Exception | None) -> None:
    """Return only if all processes of a mesh are well.

    Raises:
        Exception: this process's own error.
        LaunchError: another has one, or did not come.
    """
    errors = {} if error is None else {dist.get_rank(): str(error)}
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        device = torch.device(mesh.device_type)
        start = Launch(dist.get_rank(group), group.size(), device, group, control_group(group))
        for found in agreement.exchange(start, errors):
            errors = errors | found
    if error is not None:
        raise error
    if errors:
        first = min(errors)
        raise LaunchError(f"process {first}: {errors[first]}")
