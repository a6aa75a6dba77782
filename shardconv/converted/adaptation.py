"""Plan and write an adapter with its model, after ``adapt`` has checked the arguments."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from shardconv_runtime.adapters.adapter_files import write_adapter
from shardconv_runtime.adapters.adapter_names import (
    CONFIG_NAME,
    DEFAULT,
    PLAN_NAME,
    WEIGHTS_NAME,
    naming_errors,
    peft,
)
from shardconv_runtime.adapters.attaching import (
    Adapter,
    adapter_kind,
    attach,
    read_config,
    token_remedy,
)
from shardconv_runtime.checkpoint.copying import read_into
from shardconv_runtime.checkpoint.wrapper_names import without_wrappers, wrapped_name
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.meta.meta_model import build_model

from ..adapted_plan import Adaptation
from ..arguments import SolveOptions
from ..passes import solve_plan
from .derived_directory import has_sequence_form, planned_spec
from .shards import read

_OUTERMOST = "base_model."
"""Prefix of tensor names in an adapter that peft saved."""

COPIED = (CONFIG_NAME, WEIGHTS_NAME, "README.md")


@dataclass(frozen=True)
class BaseModel:
    """The converted model that an adapter is for."""

    root: str | os.PathLike[str]
    """The directory of all stages, or its URL."""
    directory: Path
    """The directory of the first stage, or the only one, on this machine: with the small files at least."""
    plan: Plan
    name: str


def adapt_model(
    base: BaseModel,
    adapter: str | os.PathLike[str] | Any,
    target: Path,
    seed: int,
    *,
    check: bool,
    tell: Callable[[str], None],
) -> Plan:
    """Plan a model with an adapter and write both to ``target``. See ``adapt.adapt``."""
    is_path = isinstance(adapter, str | os.PathLike)
    is_saved = is_path and Path(adapter).is_dir()
    config = read_config(adapter) if is_path else adapter
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as made:
        scratch = Path(made) / target.name
        scratch.mkdir()
        remarks = _copy(Path(adapter), scratch, config) if is_saved else ()
        if is_saved:
            adapter_value = Adapter(config, os.fspath(scratch), seed, os.fspath(adapter))
        else:
            adapter_value = Adapter(config, None, seed)
        plan = planned(base.directory, base.plan, adapter_value, check=check, tell=tell)
        plan = replace(plan, notes=(*plan.notes, *remarks))
        if not is_saved:
            tell("initializing the adapter")
            spec = planned_spec(base.directory, base.plan)
            model = build_model(spec.model_class, spec.config, getattr(torch, spec.dtype), spec.tied)
            attached = attach(model, {DEFAULT: adapter_value}, trainable=True)
            tensors = dict(attached.tensors)
            if attached.copies:  # copies of modules begin with the weights of the model
                converted = read(base.root)
                entries = parameter_plans(converted.plan)
                for name, old in attached.copies.items():
                    lazy = converted.weight(old, entries[old])
                    tensors[name] = torch.empty(lazy.shape, dtype=getattr(torch, lazy.dtype))
                    read_into([lazy], [tensors[name]])
            write_adapter(attached.wrapper, DEFAULT, tensors, scratch, base.name)
        plan_json.write(plan, scratch / PLAN_NAME)
        if target.exists():
            target.rename(Path(made) / "replaced")
        scratch.rename(target)
    return plan


def planned(
    directory: Path,
    base: Plan,
    adapter: Adapter,
    *,
    check: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Plan:
    """Plan a converted model with an adapter. See ``adapt`` for errors."""
    stages = () if base.stages is None else base.stages.layers
    text = ",".join(f"{first}-{last}" for first, last in stages)
    options = SolveOptions(
        base.tp, base.experts, has_sequence_form(base), check, pp=max(1, len(stages)), stages=text
    )
    spec = planned_spec(directory, base)
    adaptation = Adaptation(base, adapter)
    try:
        plan = solve_plan(spec, options, progress=tell, adaptation=adaptation)
    except SolveError as error:
        if not options.sequence_parallel:
            raise _naming(adapter, error) from error
        try:
            plan = solve_plan(
                spec, replace(options, sequence_parallel=False), progress=tell, adaptation=adaptation
            )
        except SolveError as other:
            raise _naming(adapter, other) from other
        why = plan.inference_only or "with the adapter, activations cannot be sharded over the sequence"
        plan = replace(plan, notes=(*plan.notes, f"no form for sequence parallelism: {why}"))
    if plan.stages is not None and base.stages is not None:
        plan = replace(plan, stages=replace(plan.stages, memory=base.stages.memory))
    if plan.inference_only and not base.inference_only:
        plan = replace(plan, inference_only=f"with {adapter_kind(adapter)}, {plan.inference_only}")
    return replace(plan, fused=(), memory=base.memory)


def _naming(adapter: Adapter, error: SolveError) -> SolveError:
    """Return the error of a model with an adapter, with the adapter and a remedy."""
    kind = adapter_kind(adapter)
    other = "" if kind == "LORA" else "; LoRA needs no other layout of the model"
    if remedy := token_remedy(adapter):
        other = f"; {remedy}"
    return SolveError(f"{adapter} ({kind}): {error}{other}")


def _copy(source: Path, target: Path, config: Any) -> tuple[str, ...]:
    """Copy the files of a saved adapter in the form in which peft saves them: safetensors, with peft's names.

    Returns:
        Remarks for the user.
    """
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    with naming_errors(os.fspath(source)):
        tensors = peft().utils.load_peft_weights(os.fspath(source), device="cpu")
    names = _names_of_peft(tensors, config)
    changed = next(((old, new) for old, new in names.items() if old != new), None)
    if changed is not None or not (target / WEIGHTS_NAME).is_file():
        renamed = {names[name]: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(renamed, target / WEIGHTS_NAME, metadata={"format": "pt"})
    if changed is None:
        return ()
    return (f"the adapter's names are read as peft would have saved them: {changed[0]} is {changed[1]}",)


def _names_of_peft(names: Collection[str], config: Any) -> Mapping[str, str]:
    """Map names of an adapter's tensors to names without the parts of wrappers and the adapter's own name.

    Trainers that save a state dict themselves leave them in, and peft then initializes a new adapter, with a
    warning.
    """
    peft_names: Mapping[str, str] = {name: name for name in names}
    if wrapped_name(names) is not None or any(f".{_OUTERMOST}" in name for name in names):
        candidates = without_wrappers(names)
        peft_names = next(
            (c for c in candidates if all(n.startswith(_OUTERMOST) for n in c.values())), peft_names
        )
    prefix = peft().mapping.PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type)
    if not prefix:
        return peft_names
    own_name = re.compile(rf"(\.{re.escape(prefix)}[^.]*)\.{DEFAULT}(?=\.|$)")
    return {old: own_name.sub(r"\1", new) for old, new in peft_names.items()}
