"""An ordinary model, local or on the Hub, that is loaded by a plan that was made for it."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.checkpoint_weights import lazy_weights, select
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.packed_plan import flatten
from ..checkpoint.rank_tensors import as_planned, shard
from ..checkpoint.resolve import resolve
from ..errors import PlanError
from ..format import plan_json as codec
from ..format.manifest import Manifest, Source, sha256_of
from ..format.plan import Plan, parameter_plans
from ..format.small_files import entry_of, files_to_copy
from ..format.stored_layout import stored_plans
from ..hub.fetch import plan_path
from ..hub.library_logging import without_library_logging
from ..hub_options import Hub
from ..tensors.copying import read_tensors
from ..tensors.lazy_tensor import LazyTensor
from .windows import Windows

BATCH_BYTES = 1 << 28
"""Most bytes of tensors that are read at once; a larger tensor is read alone."""


@dataclass(frozen=True, slots=True)
class Ordinary:
    """A model and a plan that fits it by names and shapes."""

    directory: Path
    """Of the config; the weights may be elsewhere."""
    manifest: Manifest
    """Of the files other than weights, as if the directory had been converted."""
    plan: Plan
    weights: Mapping[str, LazyTensor]
    """Global tensors by the names under which the plan stores them; not read."""


def ordinary(
    model: str | os.PathLike[str], plan: str | os.PathLike[str], hub: Hub, *, trust_remote_code: bool
) -> Ordinary:
    """Find out of which bytes of a model's files each parameter of a plan is made.

    Args:
        model: directory or Hub id.
        plan: file, converted directory, or file on the Hub.
        hub: how to reach it; its revision is the model's.
        trust_remote_code: allow the model to run code of its own.

    Raises:
        SourceError: the model cannot be read, or its weights are not those of its config.
        PlanError: the plan cannot be read, or is for another model.
    """
    plan_file = plan_path(plan, hub)
    solved = codec.read(plan_file)
    is_packed = any(entry.packing for entry in solved.parameters)
    spec = resolve(
        model,
        hub,
        dtype=None if is_packed else solved.model.dtype,
        trust_remote_code=trust_remote_code and solved.model.trust_remote_code,
        stream=True,
    )
    if spec.class_name != solved.model.class_name:
        raise PlanError(
            f"the plan is for a {solved.model.class_name}, and {spec.name} is a {spec.class_name}; "
            "make a plan of that model"
        )
    with without_library_logging():  # transformers would log of a model that is not loaded yet
        found = lazy_weights(spec)
    planned, weights = flatten(solved, select(spec, found, parameter_plans(solved).keys(), solved.tied))
    if is_packed and parameter_plans(planned) != parameter_plans(solved):
        raise PlanError(f"the plan is for other packed weights than those of {spec.name}; make a plan of it")
    assert spec.directory is not None, "it was resolved from a directory or from the Hub"
    described = _manifest(spec, spec.directory, solved.tp, sha256_of(plan_file))
    return Ordinary(spec.directory, described, solved, weights)


def local_tensors(
    plan: Plan, weights: Mapping[str, LazyTensor], rank: int, device: torch.device
) -> Generator[tuple[str, Tensor]]:
    """The local tensors of ``rank``: for the CPU mapped where a local file has them as they are, else read.

    Args:
        plan: how each parameter is laid out.
        weights: global tensors by the names under which the plan stores them.
        rank: the rank.
        device: where the tensors go.

    Yields:
        Names and local tensors of the plan's dtypes.

    Raises:
        SourceError: a weight does not have the shape that the plan says, or cannot be read.
    """
    entries = stored_plans(plan)
    windows = Windows() if device.type == "cpu" else None
    batch: dict[str, LazyTensor] = {}
    num_bytes = 0
    for name, entry in entries.items():
        part = shard(entry, as_planned(name, entry, weights[name]), plan.mesh, rank)
        window = windows.window(part) if windows is not None else None
        if window is not None:
            yield name, window
            continue
        if batch and num_bytes + part.num_bytes > BATCH_BYTES:
            yield from _read(batch, device)
            batch, num_bytes = {}, 0
        batch[name] = part
        num_bytes += part.num_bytes
    yield from _read(batch, device)


def _read(batch: Mapping[str, LazyTensor], device: torch.device) -> Generator[tuple[str, Tensor]]:
    for name, tensor in zip(batch, read_tensors(list(batch.values())), strict=True):
        yield name, tensor.to(device)


def _manifest(spec: ModelSpec, directory: Path, tp: int, plan_sha256: str) -> Manifest:
    entries = [entry_of(directory, path) for path in files_to_copy(directory, code=spec.trust_remote_code)]
    name = spec.name if spec.revision else directory.resolve().name
    return Manifest(tp, plan_sha256, Source(name, spec.revision), {}, tuple(entries))
