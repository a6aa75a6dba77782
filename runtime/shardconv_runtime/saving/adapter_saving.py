"""Adapters of a loaded model as files that the peft library loads, in one process or anywhere."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..adapters.adapter_files import saved_names, write_adapter
from ..adapters.adapter_names import CONFIG_NAME, DEFAULT, PLAN_NAME, WEIGHTS_NAME, peft
from ..comm import agreement
from ..errors import CheckpointError, MissingFileError, OptionError, RefusedCallError, ShardconvError
from ..format import plan_json
from ..format.plan import ParameterPlan, global_shape, parameter_plans
from ..format.slices import Mesh, ranges
from ..format.stage_names import held_names
from ..format.stored_layout import holds_values, is_common
from ..loaded import loaded
from .replicas import Replicas, full_tensor, replicas_of, staged
from .stored_model import named_tensors

README = "README.md"


def save_adapters(
    wrapper: Any,
    out: str | os.PathLike[str],
    names: Collection[str] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write adapters of a model that was loaded with them; every process calls it."""
    adapters = loaded(wrapper).building.checked.adapters.adapters
    chosen = list(adapters if names is None else names)
    if unknown := [name for name in chosen if name not in adapters]:
        raise OptionError(f"{unknown[0]!r} is not an adapter of this model; it has {', '.join(adapters)}")
    holders, source = replicas_of(wrapper), loaded(wrapper)
    # peft saves tensors of existing modules only, and a stage does not have all modules.
    whole = wrapper if source.stage is None else source.building.unsharded_wrapper()
    target = Path(out).expanduser().resolve()
    with staged(holders, target, overwrite=overwrite, known=adapter_files) as staging:
        more = source.attached.replaced
        for name in chosen:
            tensors = gathered_adapter(wrapper, name, holders, whole)
            error: Exception | None = None
            if holders.is_leader:
                folder = staging.path if name == DEFAULT else staging.path / name  # as peft does
                try:
                    write_adapter(whole, name, tensors, folder, more=more)
                    plan_json.write(adapters[name].plan, folder / PLAN_NAME)
                except ShardconvError as failure:
                    error = failure
                except OSError as failure:
                    error = CheckpointError(f"{out} cannot be written: {failure.strerror or failure}")
                except Exception as failure:
                    error = failure
            holders.agree(error, agreement.READ_TIMEOUT_S)
        if holders.is_leader:
            staging.commit()
        holders.agree(None)


def wrapper_of(model: nn.Module) -> Any:
    """Return the ``peft.PeftModel`` that a model is, or that is in its wrappers."""
    wrapper = next((module for module in model.modules() if isinstance(module, peft().PeftModel)), None)
    if wrapper is None:
        raise RefusedCallError(
            "this is the model inside of a PeftModel; pass the PeftModel, which has the adapters"
        )
    return wrapper


def adapter_files(directory: Path) -> list[str]:
    """Return the files of a directory of adapters."""
    paths = [
        f"{path.parent.relative_to(directory) / name}"
        for path in directory.rglob(PLAN_NAME)
        for name in (PLAN_NAME, CONFIG_NAME, WEIGHTS_NAME, README)
    ]
    if not paths:
        raise MissingFileError(f"{directory}: it has no {PLAN_NAME}")
    return paths


def gathered_adapter(wrapper: Any, name: str, holders: Replicas, whole: Any) -> dict[str, Tensor]:
    """Return the tensors of one adapter by FQN, global, on the CPU of the leader; elsewhere nothing.

    Every process of the model calls it.
    """
    source = loaded(wrapper)
    entries = parameter_plans(source.plan)
    firsts = dict(source.plan.tied)
    tensors, names_in_model = named_tensors(wrapper), held_names(source.plan, source.stages)
    gathered: dict[str, Tensor] = {}
    names_to_save = {*saved_names(whole, name, [*entries, *firsts]), *source.attached.replaced}
    for fqn, entry in entries.items():
        if fqn in names_to_save:
            local = tensors[names_in_model[fqn]].detach() if fqn in names_in_model else None
            if isinstance(local, DTensor):
                local = full_tensor(local)
            # One tensor is enough if all ranks have the same; with stages, only some processes have it.
            if not holders.is_first or (is_common(entry) and source.stage is None):
                parts = [] if local is None else [local.cpu()]
            else:
                parts_of_ranks = agreement.exchange(source.launch, None if local is None else local.cpu())
                parts = [part for part in parts_of_ranks if part is not None][: source.plan.tp]
            if holders.is_leader:
                mesh = source.plan.mesh
                if is_common(entry):
                    gathered[fqn] = parts[0]
                else:
                    out = torch.empty(global_shape(entry), dtype=parts[0].dtype)
                    for rank, part in enumerate(parts):
                        if holds_values(entry, mesh, rank):
                            for there, here in held_boxes(entry, mesh, rank):
                                out[there] = part[here]
                    gathered[fqn] = out
    for alias, first in firsts.items():
        if first in gathered and alias in names_to_save:
            gathered[alias] = gathered[first]
    return gathered


def held_boxes(
    entry: ParameterPlan, mesh: Mesh, rank: int
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield windows of the global tensor, and of the rank's, that are the same positions."""
    dims = []
    for dim in entry.dims:
        spans, done = [], 0
        for start, stop in ranges(dim, mesh, rank):
            spans.append((slice(start, stop), slice(done, done + stop - start)))
            done += stop - start
        dims.append(spans)
    for cell in product(*dims):
        yield tuple(there for there, _ in cell), tuple(here for _, here in cell)
