"""Options of ``load``: those of transformers that are refused with a remedy, and forms that need a check."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NoReturn

import torch

from ..errors import CheckpointError, PlanError
from ..files import manifest
from ..files.hub_downloads import beside
from ..files.small_files import stage_directory
from ..format.plan import Plan
from ..format.plan_json import of_sequence, require_training
from ..format.stage_names import num_stages, stages_of
from ..packed.formats import FORMATS
from .checked_source import CheckedSource

_CONVERTED = "it was decided when the model was converted; leave it out, or convert with another setting"


_REMEDIES = {
    "torch_dtype": "pass dtype=",
    "device_map": "each rank loads its own part to its own device; leave it out, or pass device=",
    "max_memory": "each rank loads its own part; `shardconv plan --device-memory` says what fits",
    "low_cpu_mem_usage": "no rank builds the full model; leave it out",
    "tp_plan": "the converted directory has a plan; leave it out",
    "tp_size": "convert with --tp, or `shardconv reshard`",
    "distributed_config": "pass mesh=; the converted directory has a plan",
    "device_mesh": "pass mesh=",
    "attn_implementation": "call model.set_attn_implementation(...) on every rank after loading",
    "quantization_config": _CONVERTED,
    "load_in_8bit": _CONVERTED,
    "load_in_4bit": _CONVERTED,
    "config": _CONVERTED,
    "use_auth_token": "pass token=",
    "force_download": "remove the files from the cache, or pass cache_dir=",
    "subfolder": "pass the path of the directory itself",
}
"""Options -> the remedy."""


def refuse_options(names: Collection[str]) -> NoReturn:
    """Raise ``PlanError`` with the first option and its remedy."""
    name = sorted(names)[0]
    remedy = _REMEDIES.get(name, "see help(shardconv_runtime.load) for its arguments")
    raise PlanError(f"load does not take {name}=: {remedy}")


def require_form(
    plan: Plan,
    *,
    training: bool,
    sequence_parallel: bool,
    stays_packed: bool,
    in_parts: bool,
    adapted: bool = False,
) -> None:
    """Check that a plan has the wanted form."""
    packings = sorted({entry.packing.method for entry in plan.parameters if entry.packing is not None})
    with_backward = [each.method for each in FORMATS if each.has_backward]
    if stays_packed and not (adapted and not sequence_parallel and set(packings) <= set(with_backward)):
        raise PlanError(
            f"packed weights ({', '.join(packings)}) are for inference, without sequence parallelism, and of "
            f"{', '.join(with_backward)} under adapters that are trained; pass dequantize=True"
        )
    if in_parts and packings:
        raise PlanError(
            f"data_parallel=: packed weights ({', '.join(packings)}) are dequantized as whole tensors of a "
            "rank; leave it out, and call shardconv_runtime.data_parallel afterwards; or convert the model "
            "with --dtype bfloat16"
        )
    if training:
        require_training(plan)
    if sequence_parallel:
        of_sequence(plan)


def with_further(found: CheckedSource, per_process: int) -> CheckedSource:
    """Add the directories of a process's other stages, which are next to its first stage's directory."""
    stages = found.plan.stages
    if found.checkpoint is not None or stages is None or stages.own is None:
        return found
    count, more = num_stages(found.plan), []
    for stage in stages_of(found.plan, stages.own, count // per_process)[1:]:
        name, repository = stage_directory(stage, count), found.repository
        if repository is None:
            directory = found.directory.parent / name
            described = manifest.read(directory)
        else:
            repository, described = beside(repository, name)
            directory = repository.directory
        other = CheckedSource(directory, described, manifest.read_plan(directory, described), repository)
        if other.common_manifest.plan_sha256 != found.common_manifest.plan_sha256:
            raise CheckpointError(
                f"{directory} and {found.directory} are from two conversions; copy or convert the model again"
            )
        more.append(other)
    return replace(found, more=tuple(more))


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise PlanError(f"dtype={dtype!r} is not the name of a torch dtype")
    return torch_dtype
