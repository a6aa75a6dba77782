"""What a user may do with a sharded model beside plain forward passes: made right, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..comm.collectives import Communicator
from ..format.plan import ModulePlan, ParameterPlan, Plan
from .embeddings import attach_embeddings
from .refusals import check_hidden_states, refuse, refuse_head_masks, refuse_implementations

# How a rank that holds some of the experts multiplies: by groups of tokens, in decoding as well.
#
# On a GPU, transformers decodes with "batched_mm": it copies the matrices of each token's experts, and
# multiplies by all of them. A rank would do so for the tokens of other ranks' experts, too, with a weight of
# zero: the result is right, and each rank does the work of all. "grouped_mm" reads the matrices of its own
# experts that have tokens.

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


WHY_NO_ATTENTIONS = (
    "whose heads are sharded: each rank would return the weights of its own heads; run the unsharded model "
    "to look at attention weights"
)
WHY_NO_EMBEDDINGS = (
    "whose plan was not proven with it; pass ids. `shardconv replan`, or `plan --check`, proves it where "
    "the unsharded model runs on random embeddings; a sequence-parallel model takes ids only"
)
WHY_LEFT_OUT = (
    "that could not be traced with it, or whose ranks computed something else with it than one process; "
    "`shardconv plan` says why. Without it, the model is right"
)
EMBEDDINGS = ("inputs_embeds", "decoder_inputs_embeds")
"""Arguments that are given in place of ids."""


def attach_guards(
    model: nn.Module,
    plan: Plan,
    modules: Mapping[str, ModulePlan],
    parameters: Mapping[str, ParameterPlan],
    comm: Communicator,
) -> None:
    """Guard a model of several ranks, in place.

    Args:
        model: all of it, with its steps attached.
        plan: of it.
        modules: entries of the plan that were applied, by FQN.
        parameters: the same of parameters.
        comm: this rank.
    """
    refuse(model, "output_attentions", WHY_NO_ATTENTIONS)
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
    check_hidden_states(model, comm)
