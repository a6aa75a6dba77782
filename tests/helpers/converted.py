"""Converted directories, and plans of a small Llama on any mesh, made without the converter."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from shardconv_runtime.files import manifest
from shardconv_runtime.files.fingerprint import code_info
from shardconv_runtime.files.manifest import (
    FileEntry,
    Manifest,
    Source,
    shard_metadata,
    shard_path,
)
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import Dim, Leaf, Product
from shardconv_runtime.format.module_steps import ModuleStep, layout_of
from shardconv_runtime.format.plan import AttributeOverride, ModulePlan, ParameterPlan, Plan, parameter_plans
from shardconv_runtime.format.slices import Mesh, ranges
from shardconv_runtime.format.stored_layout import holds_values, is_common, layout_sha256
from small_models import hand_plan, small_config
from torch import Tensor, nn


def random_llama(dtype: torch.dtype = torch.float64, **changes: object) -> Any:
    """A small Llama whose parameters are all random, norms too."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(small_config(**changes), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def llama_plan(config: Any, mesh: Mesh, dtype: str = "float64") -> Plan:
    """The well-known plan; on a mesh of two axes, heads take the first, query groups the second."""
    plan = dataclasses.replace(
        hand_plan(config, math.prod(mesh), dtype),
        mesh=mesh,
        code=code_info(["transformers.models.llama.modeling_llama"]),
    )
    axes = tuple(range(len(mesh)))
    modules = tuple(m for m in plan.modules if not m.overrides)
    if len(mesh) == 2:
        groups = config.num_attention_heads // config.num_key_value_heads
        override = AttributeOverride("num_key_value_groups", groups, (groups // mesh[1],))
        names = (f"model.layers.{{0..{config.num_hidden_layers - 1}}}.self_attn",)
        modules += (ModulePlan(names, "boundary", overrides=(override,)),)
    plan = dataclasses.replace(
        plan,
        parameters=tuple(_on_mesh(p, config, axes) for p in plan.parameters),
        modules=tuple(_module_on_mesh(m, axes) for m in modules),
    )
    return _tied(plan) if config.tie_word_embeddings else plan


def write_directory(path: Path, model: nn.Module, plan: Plan, shards: int = 1) -> Path:
    """Write ``model`` as ``plan`` lays it out."""
    path.mkdir()
    model.config.save_pretrained(path)  # type: ignore[union-attr, operator]
    model.generation_config.save_pretrained(path)  # type: ignore[union-attr, operator]
    state, entries = model.state_dict(), parameter_plans(plan)
    files = [_entry(path, p.name, None) for p in sorted(path.iterdir())]
    for rank in (None, *range(plan.tp)):
        held = {n: e for n, e in entries.items() if is_common(e) == (rank is None)}
        tensors = {n: local_part(state[n], e, plan.mesh, rank or 0) for n, e in held.items()}
        for index in range(shards):
            name = shard_path(rank, plan.tp, index, shards)
            (path / name).parent.mkdir(exist_ok=True)
            part = {n: tensors[n] for n in sorted(tensors)[index::shards]}
            save_file(part, path / name, shard_metadata(rank, plan.tp, layout_sha256(plan)))
            files.append(_entry(path, name, rank))
    digest = plan_json.write(plan, path / manifest.PLAN_NAME)
    files.sort(key=lambda entry: entry.path)
    manifest.write(Manifest(plan.tp, digest, Source("test"), {}, tuple(files)), path)
    return path


def local_part(tensor: Tensor, entry: ParameterPlan, mesh: Mesh, rank: int) -> Tensor:
    """What ``rank`` holds of a parameter; zeros where a Partial one has its values elsewhere."""
    for dim, layout in enumerate(entry.dims):
        held = [i for start, stop in ranges(layout, mesh, rank) for i in range(start, stop)]
        tensor = tensor.index_select(dim, torch.tensor(held, dtype=torch.int64))
    tensor = tensor.to(getattr(torch, entry.dtype)).contiguous().clone()
    return tensor if holds_values(entry, mesh, rank) else torch.zeros_like(tensor)


def fill(model: nn.Module, plan: Plan, state: dict[str, Tensor], rank: int) -> None:
    """Give a parallelized model this rank's part of the parameters of ``state``."""
    for name, entry in parameter_plans(plan).items():
        owner, _, attribute = name.rpartition(".")
        local = local_part(state[name], entry, plan.mesh, rank)
        model.get_submodule(owner)._parameters[attribute] = nn.Parameter(local, requires_grad=False)


def _entry(path: Path, name: str, rank: int | None) -> FileEntry:
    data = (path / name).read_bytes()
    return FileEntry(name, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}", rank)


def _on_mesh(entry: ParameterPlan, config: Any, axes: tuple[int, ...]) -> ParameterPlan:
    return dataclasses.replace(entry, dims=tuple(_dim_on_mesh(d, config, axes) for d in entry.dims))


def _dim_on_mesh(dim: Dim, config: Any, axes: tuple[int, ...]) -> Dim:
    if len(axes) == 1:
        return dim
    if isinstance(dim, Leaf):
        return Leaf(dim.size, axes if dim.axes else ())
    assert isinstance(dim, Product)
    heads, width = dim.factors
    kv = config.num_key_value_heads
    if heads == Leaf(kv, (0,)) and kv != config.num_attention_heads:
        return dim
    return Product((Leaf(kv, (0,)), Leaf(config.num_attention_heads // kv, (1,)), width))


def _module_on_mesh(entry: ModulePlan, axes: tuple[int, ...]) -> ModulePlan:
    def on_mesh(boundary: ModuleStep) -> ModuleStep:
        changes: dict[str, Any] = {"axes": axes} if hasattr(boundary, "axes") else {}
        layout = layout_of(boundary)
        if isinstance(layout, Leaf):
            changes["layout"] = Leaf(layout.size, axes)
        return dataclasses.replace(boundary, **changes)

    return dataclasses.replace(
        entry, inputs=tuple(map(on_mesh, entry.inputs)), outputs=tuple(map(on_mesh, entry.outputs))
    )


def _tied(plan: Plan) -> Plan:
    return dataclasses.replace(
        plan,
        parameters=tuple(p for p in plan.parameters if p.names != ("lm_head.weight",)),
        tied=(("lm_head.weight", "model.embed_tokens.weight"),),
    )
