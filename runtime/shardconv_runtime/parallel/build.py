"""A model on the meta device and a plan → the same model, with one rank's modules and shapes.

The model keeps its Python code. Ints that decide shapes in that code are edited, modules that
compute on sharded dims are replaced or wrapped, and each parameter gets its local shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Communicator, Slice
from ..errors import PlanError
from ..format.dims import size
from ..format.plan import (
    AllGatherStep,
    AllReduceStep,
    Boundary,
    LocalRowsStep,
    ModulePlan,
    ParameterPlan,
    Plan,
    ReduceScatterStep,
    ZeroOutOfShardStep,
    global_shape,
    local_shape,
    module_plans,
    parameter_plans,
)
from .boundary import RowIds, TensorStep, attach, forward_signature, in_use, step
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

if TYPE_CHECKING:
    from .packed_modules import PackedModules  # few models have them


def parallelize(
    model: nn.Module,
    plan: Plan,
    comm: Communicator,
    gather_logits: bool | None = None,
    packed: PackedModules | None = None,
) -> nn.Module:
    """Make ``model`` one rank's part of itself, for inference, in place.

    Args:
        model: as ``meta_model.build_model`` makes it: parameters and persistent buffers are meta tensors of
            global shape. Afterwards they are meta tensors of local shape, under the same names.
        plan: solved for this model's code.
        comm: this rank; its mesh is the plan's.
        gather_logits: if False, the logits stay sharded, and the model refuses labels.
        packed: computes with packed parameters as they are stored; None: with dequantized ones.

    Raises:
        PlanError: the plan does not fit the model, or gathers no logits; the message names the module or
            parameter.
    """
    require_mesh(plan, comm)
    modules = module_plans(plan)
    if gather_logits is False:
        from .local_logits import WHY_NO_LABELS, without_logits_gather
        from .refusals import refuse

        modules = without_logits_gather(modules, plan.logits)
        refuse(model, "labels", WHY_NO_LABELS)
    apply_plan(model, plan, comm, modules, packed=packed)
    return model


def require_mesh(plan: Plan, comm: Communicator) -> None:
    """Check that the ranks form the mesh of the plan.

    Raises:
        PlanError: they do not.
    """
    if comm.mesh != plan.mesh:
        raise PlanError(f"the plan is for a mesh {plan.mesh}, the ranks form {comm.mesh}")


def apply_plan(
    model: nn.Module,
    plan: Plan,
    comm: Communicator,
    modules: dict[str, ModulePlan],
    *,
    training: bool = False,
    packed: PackedModules | None = None,
) -> None:
    """Edit, replace and wrap modules, and give the tensors of a model their local shapes, in place.

    Args:
        model: on meta, with global shapes.
        plan: of the parameters.
        comm: this rank.
        modules: the entries of the modules to change, by FQN.
        training: give the steps backwards; parameters require gradients as they did.
        packed: see ``parallelize``; its parameters get no gradients.

    Raises:
        PlanError: the plan does not fit the model.
    """
    parameters = parameter_plans(plan)
    _check_names(model, plan, parameters)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    _convert_modules(model, plan, modules, parameters, comm, training, packed)
    plain = parameters if packed is None else {n: e for n, e in parameters.items() if n not in packed.names}
    _shrink(model, plain, comm, frozen if training else plain)
    retie(model, plan)
    if plan.fused and not training:
        _fuse(model, plan, packed)
    if plan.modules and plan.tp > 1:
        from .guards import attach_guards

        attach_guards(model, plan, modules, parameters, comm)


def _convert_modules(
    model: nn.Module,
    plan: Plan,
    modules: dict[str, ModulePlan],
    parameters: dict[str, ParameterPlan],
    comm: Communicator,
    training: bool,
    packed: PackedModules | None,
) -> None:
    """Edit, replace and wrap the modules that the plan names."""
    targets = {fqn: submodule(model, fqn) for fqn in modules}
    for fqn, entry in modules.items():
        if entry.edits or entry.flags:
            from .edits import apply_edits, raise_flags

            with _at(fqn):
                apply_edits(targets[fqn], entry.edits, comm.rank)
                raise_flags(targets[fqn], entry.flags)
    computing = {} if packed is None else packed.replace(model, modules, training=training)
    replaced = {id(old): new for old, new in computing.items()}
    for fqn, entry in modules.items():
        if targets[fqn] in computing:
            continue
        with _at(fqn):
            target = _Target(fqn, targets[fqn], entry, parameters, dict(plan.tied), comm, training)
            replaced[id(targets[fqn])] = _convert(target)
    _swap(model, replaced)


def _fuse(model: nn.Module, plan: Plan, packed: PackedModules | None) -> None:
    """Fuse the groups of the plan; those of packed weights where their format allows it."""
    from ..format.fused_groups import fused_groups
    from .fused_products import fuse

    groups = fused_groups(plan)
    names = frozenset[str]() if packed is None else packed.names
    fuse(model, [group for group in groups if not any(f"{fqn}.weight" in names for fqn in group)])
    if packed is not None:
        packed.fuse([group for group in groups if all(f"{fqn}.weight" in names for fqn in group)])


def retie(model: nn.Module, plan: Plan) -> None:
    """Make each alias of a tied parameter the same tensor again."""
    for alias, name in plan.tied:
        owner, attribute = owner_of(model, alias)
        source, source_attribute = owner_of(model, name)
        tensors = owner._parameters if attribute in owner._parameters else owner._buffers
        tensors[attribute] = getattr(source, source_attribute)


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the parameter or buffer ``name``, and its name there.

    Raises:
        PlanError: the model has no such module, parameter or buffer.
    """
    path, _, attribute = name.rpartition(".")
    owner = submodule(model, path)
    if attribute not in owner._parameters and attribute not in owner._buffers:
        raise PlanError(f"{name}: this parameter of the plan is missing from the model")
    return owner, attribute


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """FQNs and tensors (any shape) of parameters and persistent buffers, tied ones under each name."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = path + "." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


@dataclass(frozen=True)
class _Target:
    """A module that the plan names."""

    fqn: str
    module: nn.Module
    entry: ModulePlan
    parameters: dict[str, ParameterPlan]
    tied: dict[str, str]
    comm: Communicator
    training: bool = False

    def parameter(self, name: str) -> ParameterPlan:
        """The plan of one of the module's parameters."""
        fqn = f"{self.fqn}.{name}" if self.fqn else name
        found = self.parameters.get(self.tied.get(fqn, fqn))
        if found is None:
            raise PlanError(f"the plan lacks the parameter {fqn!r}")
        return found

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Local shape of one of the module's parameters."""
        return local_shape(self.parameter(name), self.comm.mesh, self.comm.rank)

    def steps(self, side: str, ignored: type[Boundary] | tuple[()] = ()) -> list[TensorStep]:
        """The steps on the only input, or on the output."""
        boundaries = self.entry.inputs if side == "input" else self.entry.outputs
        slots = ("input.input", "input.0") if side == "input" else ("output",)
        for boundary in boundaries:
            if boundary.slot not in slots:
                raise PlanError(f"a {type(self.module).__name__} has no slot {boundary.slot!r}")
        steps = [b for b in in_use(boundaries, self.training) if not isinstance(b, ignored)]
        return [step(b, self.comm, self.training) for b in steps]


def _convert(target: _Target) -> nn.Module:
    """The module that replaces the target; the target itself, with hooks, where its class is unknown."""
    _check_entry(target.entry)
    key = (target.entry.category, type(target.module))
    if key in _PARALLEL_CLASSES:
        return _PARALLEL_CLASSES[key](target).train(target.module.training)
    signature = forward_signature(target.module)
    module = target.module if target.entry.norm is None else _norm(target)
    _check_rows(target)
    _localize_padding(target)
    attach(module, target.entry, target.comm, signature, target.training)
    return module


def _column(target: _Target) -> nn.Module:
    out_features, in_features = target.local_shape("weight")
    return ColumnParallelLinear(
        in_features,
        out_features,
        target.module.bias is not None,
        inputs=target.steps("input"),
        outputs=target.steps("output"),
        training=target.training,
        device=torch.device("meta"),
    )


def _row(target: _Target) -> nn.Module:
    out_features, in_features = target.local_shape("weight")
    has_bias = target.module.bias is not None
    bias_is_partial = has_bias and bool(target.parameter("bias").partial)
    if has_bias and not bias_is_partial and not _sums(target.entry):
        raise PlanError("each rank would add the bias to its partial output; make the bias partial")
    inputs = target.steps("input")
    if not target.entry.input_is_parallel and not any(isinstance(s, Slice) for s in inputs):
        grad_axes = () if target.training else None
        inputs.append(Slice(target.comm, -1, target.parameter("weight").dims[1], grad_axes))
    return RowParallelLinear(
        in_features,
        out_features,
        has_bias,
        bias_is_partial=bias_is_partial,
        inputs=inputs,
        outputs=target.steps("output"),
        device=torch.device("meta"),
    )


def _embedding(target: _Target) -> nn.Module:
    module = target.module
    assert isinstance(module, nn.Embedding)
    if module.max_norm is not None:
        raise PlanError("an embedding with max_norm changes its rows when used; it cannot be sharded")
    _check_rows(target)
    rows = RowIds(target.comm, target.parameter("weight").dims[0])
    return VocabParallelEmbedding(
        rows,
        target.local_shape("weight")[1],
        None if module.padding_idx is None else rows.local(module.padding_idx),
        num_embeddings=module.num_embeddings,
        inputs=target.steps("input", ignored=LocalRowsStep),
        outputs=target.steps("output", ignored=ZeroOutOfShardStep),
        device=torch.device("meta"),
    )


def _norm(target: _Target) -> nn.Module:
    from .sharded_norm import ShardedNorm  # few models have one

    assert target.entry.norm is not None
    return ShardedNorm(target.entry.norm, target.module, target.comm, target.training)


_PARALLEL_CLASSES: dict[tuple[str, type[nn.Module]], Callable[[_Target], nn.Module]] = {
    ("column", nn.Linear): _column,
    ("vocab", nn.Linear): _column,
    ("row", nn.Linear): _row,
    ("vocab", nn.Embedding): _embedding,
}
"""Only these exact classes are replaced; a subclass may compute something else, so it is wrapped."""


def _check_rows(target: _Target) -> None:
    """Check that the layout by which ids become local is that of the rows of a weight."""
    tables = [n for n, p in target.module._parameters.items() if p is not None and p.dim() > 1]
    rows = {target.parameter(name).dims[0] for name in tables}
    for layout in (b.layout for b in target.entry.inputs if isinstance(b, LocalRowsStep)):
        if layout not in rows and size(layout) in map(size, rows):
            raise PlanError("local_rows has another layout than the rows of the weight")


def _localize_padding(target: _Target) -> None:
    """An embedding's padding id is a row id too, and must be one of the local table."""
    module = target.module
    if not isinstance(module, nn.Embedding) or module.padding_idx is None:
        return
    for boundary in target.entry.inputs:
        if isinstance(boundary, LocalRowsStep):
            row = RowIds(target.comm, boundary.layout).local(module.padding_idx)
            module.padding_idx = row  # type: ignore[assignment]  # torch's stub forgets None
            return


def _check_entry(entry: ModulePlan) -> None:
    if entry.gather_output and not any(isinstance(step, AllGatherStep) for step in entry.outputs):
        raise PlanError("gather_output is set, but the outputs have no all_gather")
    if entry.reduce_output and not _sums(entry):
        raise PlanError("reduce_output is set, but the outputs have no all_reduce or reduce_scatter")
    if entry.category == "norm" and entry.norm is None:
        raise PlanError("the category is norm, but the entry has no norm")


def _sums(entry: ModulePlan) -> bool:
    return any(isinstance(step, AllReduceStep | ReduceScatterStep) for step in entry.outputs)


def _check_names(model: nn.Module, plan: Plan, parameters: dict[str, ParameterPlan]) -> None:
    """Check that the plan covers each stored tensor of the model, with its global shape."""
    tied = dict(plan.tied)
    present = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model)}
    if missing := sorted((parameters.keys() | tied.keys()) - present.keys()):
        raise PlanError(
            f"{len(missing)} parameter(s) of the plan are missing from the model, e.g. {missing[0]}"
        )
    if extra := sorted(present.keys() - parameters.keys() - tied.keys()):
        raise PlanError(f"{len(extra)} parameter(s) of the model are missing from the plan, e.g. {extra[0]}")
    for name, entry in parameters.items():
        if present[name] != global_shape(entry):
            raise PlanError(
                f"{name}: the plan is for shape {global_shape(entry)}, the model has {present[name]}; "
                "config.json is not the one that was converted"
            )


def submodule(model: nn.Module, fqn: str) -> nn.Module:
    """The module of a plan's entry.

    Raises:
        PlanError: the model has no module of this name.
    """
    try:
        return model.get_submodule(fqn)
    except AttributeError as error:
        raise PlanError(f"{fqn}: this module of the plan is missing from the model") from error


def _swap(model: nn.Module, replaced: dict[int, nn.Module]) -> None:
    """Put the new modules where the old ones are, under each of their names."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = replaced.get(id(child), child)


def _shrink(
    model: nn.Module, parameters: dict[str, ParameterPlan], comm: Communicator, frozen: Collection[str]
) -> None:
    """Give each stored tensor a meta tensor of its local shape and of the plan's dtype."""
    for name, entry in parameters.items():
        owner, attribute = owner_of(model, name)
        shape = local_shape(entry, comm.mesh, comm.rank)
        local = torch.empty(shape, dtype=getattr(torch, entry.dtype), device="meta")
        is_parameter = attribute in owner._parameters
        tensors: dict[str, Any] = owner._parameters if is_parameter else owner._buffers
        tensors[attribute] = nn.Parameter(local, requires_grad=name not in frozen) if is_parameter else local


class _at:
    """Puts the name of a module in front of a PlanError."""

    def __init__(self, fqn: str) -> None:
        self._fqn = fqn or "the model itself"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, PlanError):
            raise PlanError(f"{self._fqn}: {error}") from error
