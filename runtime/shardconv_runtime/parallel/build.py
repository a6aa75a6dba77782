"""A model on the meta device and a plan → the same model, with one rank's modules and shapes.

The model keeps its Python code. Ints that decide shapes in that code are overridden, modules that
compute on sharded dims are replaced or wrapped, and each parameter gets its local shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Communicator
from ..errors import PlanError
from ..format.dims import axes_of
from ..format.fused_groups import fused_groups
from ..format.plan import (
    ModulePlan,
    ParameterPlan,
    Plan,
    by_name,
    global_shape,
    local_shape,
    module_plans,
    parameter_plans,
)
from .attention_weights import ASK, gather_attentions, refuse_attentions
from .embeddings import attach_embeddings
from .fused_products import fuse
from .hidden_states import attach_hidden_states
from .layers import WHY_NO_LABELS, without_logits_gather
from .local_modules import localize_modules
from .outside_calls import EMBEDDINGS, complete_outside_calls
from .refusals import refuse, refuse_head_masks, refuse_implementations
from .row_ids import VocabularyRows

if TYPE_CHECKING:
    from .packed_modules import PackedModules


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""All dropout modules of torch."""


def parallelize(
    model: nn.Module,
    plan: Plan,
    comm: Communicator,
    gather_logits: bool | None = None,
    packed: PackedModules | None = None,
    heads: Collection[str] = (),
) -> nn.Module:
    """Make ``model`` one rank's part of itself, for inference, in place.

    Args:
        model: a model from ``meta_model.build_model``: parameters and persistent buffers are meta tensors of
            global shape. Afterwards they are meta tensors of local shape, under the same names.
    """
    require_mesh(plan, comm)
    modules = module_plans(plan)
    if gather_logits is False:
        modules = without_logits_gather(modules, plan.logits, heads)
        refuse(model, "labels", WHY_NO_LABELS)
    apply_plan(model, plan, comm, modules, packed=packed)
    return model


def without_fast_paths(model: nn.Module) -> None:
    """Let torch's attention and encoder layers call their submodules, in this process from now on.

    Without gradients they call one operator with the weights of all submodules instead, which are local here.
    https://docs.pytorch.org/docs/stable/backends.html#torch.backends.mha.set_fastpath_enabled
    """
    if any(isinstance(each, nn.MultiheadAttention | nn.TransformerEncoderLayer) for each in model.modules()):
        torch.backends.mha.set_fastpath_enabled(False)


def require_mesh(plan: Plan, comm: Communicator) -> None:
    """Check that the ranks form the mesh of the plan."""
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
    """Override attributes, replace and wrap modules, and give tensors their local shapes, in place.

    Args:
        model: the model on meta, with global shapes.
    """
    parameters = parameter_plans(plan)
    check_names(model, plan, parameters)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if plan.tp > 1 or packed is not None:  # a single rank computes as the unsharded model does
        without_fast_paths(model)
        targets = {fqn: submodule(model, fqn) for fqn in modules}
        localize_modules(model, plan, modules, targets, parameters, comm, training, packed)
    plain = parameters if packed is None else {n: e for n, e in parameters.items() if n not in packed.names}
    head = dict(model.named_modules()).get(plan.logits.module) if plan.logits is not None else None
    # Give each stored tensor a meta tensor of its local shape and of the plan's dtype.
    for name, entry in plain.items():
        owner, attribute = owner_of(model, name)
        shape = local_shape(entry, comm.mesh, comm.rank)
        local = torch.empty(shape, dtype=getattr(torch, entry.dtype), device="meta")
        if attribute in owner._parameters:
            needs_grad = training and name not in frozen
            has_rows = attribute == "weight" and bool(comm.real(axes_of(entry.dims[0])))
            is_table = has_rows and (isinstance(owner, nn.Embedding) or owner is head)
            kind = VocabularyRows if is_table else nn.Parameter
            owner._parameters[attribute] = kind(local, requires_grad=needs_grad)
        else:
            owner._buffers[attribute] = local
    retie(model, plan)
    if plan.fused and not training:
        groups = fused_groups(plan)
        names = frozenset[str]() if packed is None else packed.names
        fuse(model, [group for group in groups if not any(f"{fqn}.weight" in names for fqn in group)])
        if packed is not None:  # packed weights are fused by modules of their formats, if these allow it
            packed.fuse([group for group in groups if all(f"{fqn}.weight" in names for fqn in group)])
    if plan.modules and plan.tp > 1:
        attach_guards(model, plan, modules, parameters, comm, training)


def retie(model: nn.Module, plan: Plan) -> None:
    """Make each alias of a tied parameter the same tensor again."""
    for alias, name in plan.tied:
        owner, attribute = owner_of(model, alias)
        source, source_attribute = owner_of(model, name)
        tensors = owner._parameters if attribute in owner._parameters else owner._buffers
        tensors[attribute] = getattr(source, source_attribute)


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has the parameter or buffer ``name``, and its name there."""
    path, _, attribute = name.rpartition(".")
    owner = submodule(model, path)
    if attribute not in owner._parameters and attribute not in owner._buffers:
        raise PlanError(f"{name}: this parameter of the plan is missing from the model")
    return owner, attribute


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield FQNs and tensors of parameters and persistent buffers, tied ones under each name."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = path + "." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


def check_names(model: nn.Module, plan: Plan, parameters: dict[str, ParameterPlan]) -> None:
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
    """Return the module of a plan's entry."""
    try:
        return model.get_submodule(fqn)
    except AttributeError as error:
        raise PlanError(f"{fqn}: this module of the plan is missing from the model") from error


# A rank that holds some of the experts multiplies by groups of tokens, in decoding as well.
#
# On a GPU, transformers decodes with "batched_mm", which copies the matrices of each token's experts and
# multiplies by all of them. A rank would do this for the tokens of other ranks' experts too, with a weight of
# zero: the result is right, but each rank does the work of all. "grouped_mm" reads only the matrices of the
# rank's own experts that have tokens.

BATCHED, GROUPED = "batched_mm", "grouped_mm"
"""Transformers' names."""


def keep_grouped(model: nn.Module) -> None:
    """Have a model's ``set_experts_implementation``, which decoding calls, take grouped products for batched.

    Other dtypes than bfloat16 stay as they are: for them no grouped product can be recorded in a CUDA graph.
    """
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation = MethodType(_set, model)  # type: ignore[assignment]


def _set(self: Any, experts_implementation: str | Mapping[str, str]) -> None:
    chosen: Any = experts_implementation
    if self.dtype == torch.bfloat16:
        is_one = isinstance(chosen, str)
        chosen = _grouped(chosen) if is_one else {name: _grouped(value) for name, value in chosen.items()}
    type(self).set_experts_implementation(self, chosen)


def _grouped(implementation: str) -> str:
    return GROUPED if implementation == BATCHED else implementation


WHY_NO_EMBEDDINGS = (
    "whose plan was not proven with it; pass ids. `shardconv reshard --in-place`, or `plan --check`, proves "
    "it where the unsharded model runs on random embeddings; a sequence-parallel model takes ids only"
)
WHY_LEFT_OUT = (
    "that could not be traced with it, or whose ranks computed something else with it than one process; "
    "`shardconv plan` says why. Without it, the model is right"
)


def attach_guards(
    model: nn.Module,
    plan: Plan,
    modules: Mapping[str, ModulePlan],
    parameters: Mapping[str, ParameterPlan],
    comm: Communicator,
    training: bool,
) -> None:
    """Guard a model of several ranks, in place."""
    if ASK in plan.proven_arguments:
        gathers = {name: each.outputs for name, each in by_name("attentions", plan.attentions).items()}
        gather_attentions(model, gathers, comm, training)
    else:
        refuse_attentions(model)
    refuse_head_masks(model)
    for argument in EMBEDDINGS:
        if argument not in plan.proven_arguments:
            refuse(model, argument, WHY_NO_EMBEDDINGS)
    for argument in plan.left_out:
        refuse(model, argument, WHY_LEFT_OUT)
    for attribute, names in (
        ("_attn_implementation", plan.wrong_attention),
        ("_experts_implementation", plan.wrong_experts),
    ):
        if names:
            refuse_implementations(model, attribute, names)
    if plan.experts == "ep" and GROUPED not in plan.wrong_experts:
        keep_grouped(model)
    attach_embeddings(model, modules, parameters, dict(plan.tied), comm)
    is_running = attach_hidden_states(model, plan, comm, training)
    complete_outside_calls(model, plan, comm, training, is_running)
