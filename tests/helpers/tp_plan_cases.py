"""Small models for the tests of ``tp_plan``, their plans, and plans that a solver would not choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
import transformers
from boundaries import boundary
from shardconv_runtime.format.dims import Dim, Leaf, Product, size
from shardconv_runtime.format.module_steps import ModuleStep
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import ModulePlan, ParameterPlan, Plan

import shardconv
from shardconv.exports.tp_plan import skeleton

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCAB = 8, 4, 8, 64, 96, 64

_DECODER = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": MLP,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT = {"vocab_size": VOCAB, "n_layer": 2, "n_head": HEADS, "n_embd": HIDDEN, "n_positions": 64}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": {**_DECODER, "head_dim": HEAD_DIM},
    "gemma2": {**_DECODER, "head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM},
    "gpt_neox": {**_DECODER, "rotary_pct": 0.5},
    "glm": {**_DECODER, "head_dim": HEAD_DIM},
    "mixtral": {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_DECODER, **_EXPERTS, "head_dim": HEAD_DIM},
    "qwen2_moe": {**_DECODER, **_EXPERTS, "shared_expert_intermediate_size": MLP},
    "aria_text": {**_DECODER, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "phi3": _DECODER,
    "olmo2": _DECODER,
    "cohere": _DECODER,
    "gpt2": _GPT,
    "gpt_oss": {**_DECODER, "num_local_experts": 4, "head_dim": HEAD_DIM},
    "hrm_text": {**_DECODER, "head_dim": HEAD_DIM},
}
"""What is set in the config of each type."""


def config(model_type: str, *, dense_first: bool = False, **changes: Any) -> Any:
    """The small config of a type; with ``dense_first``, one whose first layer has no experts."""
    if dense_first:
        changes["mlp_only_layers"] = [0]
    return transformers.CONFIG_MAPPING[model_type](**{**CONFIGS[model_type], **changes})


@cache
def solved(model_type: str, tp: int, experts: str = "tp", **changes: Any) -> Plan:
    """The solver's plan."""
    return shardconv.plan(config(model_type, **changes), tp=tp, experts=experts, dtype="float64")


@cache
def built(model_type: str, **changes: Any) -> Any:
    """The model without its parameters."""
    return skeleton(config(model_type, **changes))


def change_modules(plan: Plan, ending: str, change: Callable[[ModulePlan], ModulePlan | None]) -> Plan:
    """Change the entries of modules whose names end so; None takes an entry away."""
    changed = [change(m) if _ends(m.names, ending) else m for m in plan.modules]
    assert list(plan.modules) != changed
    return replace(plan, modules=tuple(m for m in changed if m is not None))


def change_parameters(plan: Plan, ending: str, change: Callable[[ParameterPlan], ParameterPlan]) -> Plan:
    """Change the entries of parameters whose names end so."""
    changed = tuple(change(p) if _ends(p.names, ending) else p for p in plan.parameters)
    assert plan.parameters != changed
    return replace(plan, parameters=changed)


def whole(entry: ParameterPlan) -> ParameterPlan:
    """The parameter whole on every rank."""
    return replace(entry, dims=tuple(Leaf(size(d)) for d in entry.dims), partial=(), reason="for a test")


def with_whole_mlp(plan: Plan) -> Plan:
    """A decoder's plan whose MLPs are not split: the class of the model would split them."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        plan = change_modules(plan, f"mlp.{name}", lambda _: None)
        plan = change_parameters(plan, f"mlp.{name}.weight", whole)
    return plan


def with_gathered_mlp(plan: Plan) -> Plan:
    """A decoder's plan whose MLPs are gathered in the middle, and sliced again."""
    layout = Leaf(MLP, (0,))
    gather = boundary("output", "all_gather", dim=-1, layout=layout, per_token=MLP)
    cut = boundary("input.input", "slice", dim=-1, layout=layout, per_token=MLP)
    for name in ("gate_proj", "up_proj"):
        plan = change_modules(plan, f"mlp.{name}", lambda m: replace(m, outputs=(gather,)))
    return change_modules(plan, "mlp.down_proj", lambda m: replace(m, inputs=(cut,)))


def on_two_axes(plan: Plan, axes: tuple[int, int] = (0, 1)) -> Plan:
    """A plan of 4 ranks for a mesh of 2 x 2 whose axes are always used together."""

    def split(dim: Dim | None) -> Any:
        if isinstance(dim, Leaf):
            return Leaf(dim.size, axes) if dim.axes else dim
        if dim is None:
            return None
        parts = tuple(map(split, dim.factors if isinstance(dim, Product) else dim.segments))
        return type(dim)(parts)

    def steps(found: tuple[ModuleStep, ...]) -> tuple[ModuleStep, ...]:
        return tuple(map(step, found))

    def step(found: ModuleStep) -> ModuleStep:
        changes = {
            "axes": axes if getattr(found, "axes", ()) else (),
            "layout": split(getattr(found, "layout", None)),
        }
        known = {field.name for field in fields(found)}
        return replace(found, **{name: value for name, value in changes.items() if name in known})

    return replace(
        plan,
        mesh=(2, 2),
        parameters=tuple(replace(p, dims=tuple(map(split, p.dims))) for p in plan.parameters),
        modules=tuple(replace(m, inputs=steps(m.inputs), outputs=steps(m.outputs)) for m in plan.modules),
    )


def random_model(model_type: str) -> Any:
    """The whole model in float64, every parameter random."""
    model = transformers.AutoModelForCausalLM.from_config(config(model_type), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                value *= HIDDEN**-0.5 * (1 if id(parameter) in embeddings else 2)
            else:
                value = 0.3 * value + (0 if name.endswith("bias") else 1)
            parameter.copy_(value)
    return model


def _ends(patterns: tuple[str, ...], ending: str) -> bool:
    return all(name.endswith(ending) for name in expand_all(patterns))
