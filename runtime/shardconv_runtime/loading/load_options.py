"""The arguments of ``load``: their values, those of other functions and versions, and forms of plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch

from ..errors import CheckpointError, OptionError
from ..files import manifest, object_stores
from ..files.hub_downloads import beside
from ..files.small_files import stage_directory
from ..files.stored_copies import StoredCopy
from ..format.plan import Plan
from ..format.plan_json import of_sequence, require_training
from ..format.stage_names import num_stages, stages_of
from ..hub_options import Hub
from ..keywords import Moved, moved_fields
from ..option_values import Communication, Compiling, Training
from ..packed.formats import FORMATS
from .checked_source import CheckedSource

_CONVERTED = "it was decided when the model was converted; leave it out, or convert with another setting"

REMEDIES = {
    "torch_dtype": "pass dtype=",
    "device_map": "each rank loads its own part to its own device; leave it out, or pass device=",
    "max_memory": "each rank loads its own part; `shardconv plan --device-memory` says what fits",
    "low_cpu_mem_usage": "no rank builds the full model; leave it out",
    "tp_plan": "the model is planned for all processes; leave it out, or pass plan=",
    "tp_size": "it is the number of processes; convert with --tp, or `shardconv reshard`",
    "distributed_config": "pass mesh=; the model has a plan",
    "device_mesh": "pass mesh=",
    "attn_implementation": "call model.set_attn_implementation(...) on every rank after loading",
    "quantization_config": _CONVERTED,
    "load_in_8bit": _CONVERTED,
    "load_in_4bit": _CONVERTED,
    "config": _CONVERTED,
    "use_auth_token": "pass hub=Hub(token=...)",
    "force_download": "remove the files from the cache, or pass hub=Hub(cache_dir=...)",
    "subfolder": "pass the path of the directory itself",
    "experts": "pass plan=Planning(experts=...)",
    "pp": "pass plan=Planning(pp=...)",
    "tp": "it is the number of processes; leave it out",
}
"""Arguments of ``from_pretrained``, and of ``convert``, that ``load`` does not have -> the remedy."""

MOVED = {
    "group": Moved("process_group"),
    **moved_fields("hub", Hub),
    **moved_fields("training", Training, needs=True),
    **moved_fields("compile", Compiling, needs=True),
    **moved_fields("communication", Communication),
}
"""Arguments that are now fields of values."""

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


V = TypeVar("V")


def as_value(name: str, argument: bool | V | None, value_class: type[V]) -> V | None:
    """Return the value of an argument that may be True for its defaults, or False for nothing."""
    if isinstance(argument, value_class):
        return argument
    if not isinstance(argument, bool | None):
        raise OptionError(
            f"{name}= should be a {value_class.__name__}(...), got {argument!r}; see "
            f"help(shardconv_runtime.{value_class.__name__})"
        )
    return value_class() if argument else None


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
        raise OptionError(
            f"packed weights ({', '.join(packings)}) are for inference, without sequence parallelism, and of "
            f"{', '.join(with_backward)} under adapters that are trained; pass dequantize=True"
        )
    if in_parts and packings:
        raise OptionError(
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
    if not found.has_shards or stages is None or stages.own is None:
        return found
    count, more = num_stages(found.plan), []
    for stage in stages_of(found.plan, stages.own, count // per_process)[1:]:
        name, repository, objects = stage_directory(stage, count), found.repository, found.objects
        if isinstance(repository, StoredCopy):
            repository = repository.beside(name)
            directory = repository.directory
        elif repository is not None:
            repository, _ = beside(repository, name)
            directory = repository.directory
        elif objects is not None:
            objects, directory = object_stores.beside(objects, name)
        else:
            directory = found.directory.parent / name
        described = manifest.read(directory)
        plan = manifest.read_plan(directory, described)
        other = CheckedSource(directory, described, plan, repository, objects)
        if other.common_manifest.plan_sha256 != found.common_manifest.plan_sha256:
            raise CheckpointError(
                f"{directory} and {found.directory} are from two conversions; copy or convert the model again"
            )
        more.append(other)
    return replace(found, more=tuple(more))


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of a name; None, the stored dtype, for ``"auto"``."""
    if dtype is None or dtype == "auto":
        return None
    torch_dtype: Any = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        torch_dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise OptionError(f"dtype={dtype!r} is not the name of a torch dtype of floating-point numbers")
    return torch_dtype
