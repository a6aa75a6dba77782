"""Data parallelism on top of tensor parallelism: FSDP2 over the other dims of the device mesh.

``fully_shard`` shards the rank's local parameters; collectives of tensor parallelism and their sums of
gradients run inside of the modules, on the local parameters that FSDP has gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..comm import agreement
from ..comm.mesh import PP, TP, data_dims, mesh_processes, model_group
from ..errors import LaunchError, RefusedCallError
from ..format.plan import Plan, parameter_plans
from ..format.plan_json import of_sequence
from ..format.stage_names import staged_modules
from ..loaded import loaded, unwrapped
from ..saving.stored_model import named_modules, named_tensors
from .checkpointing import repeated_layers
from .replica_comparison import compare_replicas

# The models that were loaded for training on several ranks, for functions that are given only tensors.

MODELS: WeakSet[nn.Module] = WeakSet()
"""Each holds this rank's part of every parameter; copies are added when they are first called."""


def models_of(parameters: Iterable[object]) -> list[nn.Module]:
    """Return the models of ``MODELS`` that have some of these parameters."""
    distinct = set(parameters)  # by identity
    return [model for model in MODELS if any(parameter in distinct for parameter in model.parameters())]


MAX_DIMS = 2
"""Most dims of a mesh for data parallelism: replicas, and shards."""

_ZEROS = "set_reduce_scatter_unused_params"
"""A method of FSDP2 in newer versions of torch: zeros are the gradients of parameters that nothing used."""


@dataclass(frozen=True)
class DataParallel:
    """Options of FSDP2 for ``load(data_parallel=)``.

    Attributes:
        param_dtype: dtype in which layers compute; by default the dtype of the parameters.
        reduce_dtype: dtype in which gradients are averaged.
        reshard_after_forward: free the gathered parameters of a layer after its forward pass.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Apply FSDP2 to each layer and to the rest of a loaded model.

    ``load(..., data_parallel=)`` does the same before it reads the weights, so no device holds the full
    shard of a rank. Call this function on every process, before you create the optimizer. If it raises on
    one process, it raises on all. Parameters become DTensors over the dims of the mesh other than "tp", and
    gradients are averaged over these dims.

    Args:
        model: returned by ``load(..., mesh=mesh, training=True)``.
        mesh: the mesh with which the model was loaded. It has a dim named "tp" and one other dim (FSDP), or
            two: the first for replicas, the second for shards (HSDP).
        param_dtype: dtype in which layers compute, for example ``torch.bfloat16``; by default the dtype of
            the parameters.
        reduce_dtype: dtype in which gradients are averaged; float64 for float64 parameters without
            ``param_dtype``.
        reshard_after_forward: free the gathered parameters of a layer after its forward pass and gather
            them again for the backward pass. False needs more memory and fewer collectives. Without
            gradients, all are freed at the end of the model's forward pass.

    Returns:
        ``model``.

    Raises:
        PlanError: the model was not loaded for training, is already sharded, or has parameters that FSDP2
            cannot shard: scalars, or several dtypes in one layer.
        LaunchError: the mesh does not fit, or another process has an error.

    Example:
        >>> mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))
        >>> model = shardconv_runtime.load("out/", mesh=mesh, training=True)
        >>> shardconv_runtime.data_parallel(model, mesh, param_dtype=torch.bfloat16)
    """
    all_ranks = mesh_processes(mesh, torch.device(mesh.device_type))
    units = agreement.together(all_ranks, lambda: _units_of_loaded(model, mesh))
    _shard(units, mesh, DataParallel(param_dtype, reduce_dtype, reshard_after_forward))
    compare_replicas(unwrapped(model), all_ranks)
    return model


def shard_parameters(model: nn.Module, plan: Plan, mesh: DeviceMesh, settings: DataParallel) -> None:
    """Do the same to a model without values; no collective runs.

    Args:
        model: the model of this rank, with parameters on the meta device in the dtypes that they will have.
            They become DTensors on the meta device.
    """
    _shard(_units(model, plan), mesh, settings)


def require_data_dims(mesh: DeviceMesh) -> None:
    """Check that a mesh has dims for tensor parallelism and for data parallelism."""
    model_group(mesh)
    if not 1 <= len(data_dims(mesh)) <= MAX_DIMS:
        names = mesh.mesh_dim_names or ()
        model_dims = " and ".join(repr(name) for name in names if name in (PP, TP))
        raise LaunchError(
            f"the mesh has the dims {names}; in addition to {model_dims} it should have one for data "
            "parallelism, or two (replicas, shards)"
        )


@dataclass(frozen=True)
class _Units:
    """The modules to shard, each separately."""

    layers: Sequence[nn.Module]
    others: Sequence[nn.Module]
    """Whose backward passes come soon after their forward passes; the model is the last one."""


def _shard(units: _Units, mesh: DeviceMesh, settings: DataParallel) -> None:
    along = data_dims(mesh)
    over = mesh[along if len(along) > 1 else along[0]]
    for unit in (*units.layers, *units.others):
        frees = settings.reshard_after_forward and unit in units.layers
        dtypes = {settings.param_dtype or p.dtype for p in unit.parameters() if p.requires_grad}
        reduce_dtype = None if dtypes == {torch.float64} else settings.reduce_dtype
        policy = MixedPrecisionPolicy(settings.param_dtype, reduce_dtype)
        fully_shard(unit, mesh=over, mp_policy=policy, reshard_after_forward=frees)
        if unit in units.layers and _may_leave_out(unit):
            # Replicas reduce the gradients that they have: without zeros, other ones on each of them.
            getattr(unit, _ZEROS)(True, recurse=False)
    units.others[-1].register_forward_hook(_free_without_backward)


def _may_leave_out(layer: nn.Module) -> bool:
    """Return whether a layer has several modules of one kind, as experts are, of which it may run some."""
    for modules in layer.modules():
        if isinstance(modules, nn.ModuleList | nn.ModuleDict) and len(modules) > 1:
            kinds = {type(child) for child in modules.children()}
            if len(kinds) == 1 and any(p.requires_grad for p in modules.parameters()):
                return True
    return False


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _free_without_backward(model: nn.Module, args: object, output: object) -> None:
    """Free gathered parameters after a forward pass without a backward pass, which would free them.

    Otherwise the modules would keep them, and an optimizer that is made after an evaluation would update
    tensors that nothing reads again.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _units_of_loaded(model: nn.Module, mesh: DeviceMesh) -> _Units:
    source = loaded(model)
    if source.stage is not None:
        raise RefusedCallError(
            "a model with stages is sharded while it is loaded; pass data_parallel= to load"
        )
    require_data_dims(mesh)
    mesh_ranks = dist.get_process_group_ranks(model_group(mesh))
    group = source.launch.group
    model_ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    if mesh_ranks != model_ranks:
        raise LaunchError(
            f"the dim {TP!r} of the mesh has the processes {mesh_ranks}, and the model was loaded by "
            f"{model_ranks}; also pass the mesh to load"
        )
    return _units(unwrapped(model), source.plan)


def _units(model: nn.Module, plan: Plan) -> _Units:
    """Return the modules to shard: layers, and with stages other modules that lie in one stage, whose
    parameters are only used inside of them; and last the model.

    On stages before the last, the model returns nothing to which FSDP2 could attach hooks that gather the
    model's own parameters for a backward pass, and it would gather them in passes of all stages of a process.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise RefusedCallError(
            "fully_shard has already sharded the model or a part of it; call data_parallel once"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RefusedCallError(
            "no parameter of the model requires a gradient: it was loaded for inference; load it with "
            "training=True"
        )
    users = _users(model, plan)
    layers = repeated_layers(model)
    # Modules that are in one stage and in no layer, such as embeddings and heads.
    in_layers = {module for layer in layers for module in layer.modules()}
    staged = dict.fromkeys(model.get_submodule(fqn) for fqn in staged_modules(plan))
    apart = [module for module in staged if in_layers.isdisjoint(module.modules())]
    times = Counter(parameter for module in (*layers, *apart) for parameter in module.parameters())

    def is_closed(module: nn.Module) -> bool:
        inside, parameters = set(module.modules()), list(module.parameters())
        return bool(parameters) and all(times[p] == 1 and users[p] <= inside for p in parameters)

    units = _Units([*filter(is_closed, layers)], [*filter(is_closed, apart), model])
    leaving_out = next(filter(_may_leave_out, units.layers), None)
    if leaving_out is not None and not hasattr(FSDPModule, _ZEROS):
        raise RefusedCallError(
            f"a {type(leaving_out).__name__} has modules that may run on only some replicas "
            "(experts that no token chose), so replicas would wait for each other's gradients; this "
            f"needs a newer version of torch ({_ZEROS} of FSDP2)"
        )
    _check_parameters(model, [*units.layers, *units.others[:-1]])
    return units


def _users(model: nn.Module, plan: Plan) -> dict[Tensor, set[nn.Module]]:
    """Return the modules that have each parameter, or replace it while they run (``gates``)."""
    users: dict[Tensor, set[nn.Module]] = {parameter: set() for parameter in model.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter].add(module)
    tensors, modules = named_tensors(model), named_modules(model)
    forms = [plan]
    if plan.training is not None and plan.training.sequence is not None:
        forms.append(of_sequence(plan))
    for form in forms:
        entries = parameter_plans(form)
        for name, of in [(name, name) for name in entries] + list(form.tied):
            around = ".".join(name.split(".")[: -1 - entries[of].grad_levels])
            if (tensor := tensors.get(name)) is not None and tensor in users:
                users[tensor].add(modules[around])
    return users


def _check_parameters(model: nn.Module, units: list[nn.Module]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise RefusedCallError(
                f"{name} is a scalar, which fully_shard cannot shard; give it the shape [1]"
            )
    inside = {parameter for unit in units for parameter in unit.parameters()}
    rest = [p for p in model.parameters() if p not in inside]
    for parameters in (*(list(unit.parameters()) for unit in units), rest):
        dtypes = {p.dtype for p in parameters if p.requires_grad}
        if len(dtypes) > 1:
            raise RefusedCallError(
                f"a layer has parameters in {' and '.join(sorted(map(str, dtypes)))}, which fully_shard "
                'cannot reduce together; load the model with dtype="float32" (and pass param_dtype)'
            )
