"""Models with packed parameters: computed with as they are stored, or dequantized."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.quantized import quantization_of
from ..errors import CheckpointError, PlanError
from ..files.hub_downloads import Repository
from ..files.manifest import Manifest
from ..files.model_config import read_config
from ..files.small_files import small_files
from ..files.stored_copies import StoredCopy
from ..format.plan import ParameterPlan, Plan, global_shape, parameter_plans
from ..format.slices import Mesh, ranges
from ..format.stored_layout import tensor_name
from ..packed.formats import check_values, dequantize
from ..packed.quantizers import Quantized, require_computable
from ..packed.stored_weights import WeightSlice
from ..parallel.packed_modules import PackedModules
from .transform import RankModel, ReadTensors, Transform


def unpacked(
    stored: Generator[tuple[str, Tensor]], plan: Plan, rank: int, modules: PackedModules | None = None
) -> Generator[tuple[str, Tensor]]:
    """Yield the plain parameters of a rank, and fill its modules with the packed ones.

    Args:
        stored: yields local tensors by the names under which they are stored. It is closed.

    Yields:
        Names and local tensors of plain parameters, and of dequantized ones in the plan's dtypes.
    """
    entries = parameter_plans(plan)
    owners = {
        tensor_name(name, tensor.name): (name, entry.packing, tensor.name)
        for name, entry in entries.items()
        if entry.packing is not None
        for tensor in entry.packing.tensors
    }
    waiting: dict[str, dict[str, Tensor]] = {}
    with closing(stored) as stored_tensors:
        for stored_name, tensor in stored_tensors:
            if stored_name not in owners:
                yield stored_name, tensor
                continue
            name, packing, part = owners[stored_name]
            parts = waiting.setdefault(name, {})
            parts[part] = tensor
            if len(parts) < len(packing.tensors):
                continue
            del waiting[name]
            local_part = held_part(entries[name], plan.mesh, rank)
            check_values(packing, parts, local_part, name)
            if modules is not None:
                modules.fill(name, parts, local_part)
            else:
                yield name, dequantize(packing, parts, local_part, getattr(torch, entries[name].dtype))
    if waiting:
        raise CheckpointError(f"{min(waiting)}: the files have some of its stored tensors, and not all")


def held_part(entry: ParameterPlan, mesh: Mesh, rank: int) -> WeightSlice:
    """Return the part of a parameter that a rank holds."""
    return WeightSlice(global_shape(entry), tuple(ranges(dim, mesh, rank) for dim in entry.dims))


def require_packages(
    directory: Path,
    manifest: Manifest,
    plan: Plan,
    repository: Repository | StoredCopy | None,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    compiled: bool,
) -> None:
    """Check that the installed packages can compute with the packed parameters of a model here.

    Args:
        repository: its repository on the Hub, from which small files are downloaded; None if it is local.
        dtype: dtype of activations; None for the plan's.
    """
    if repository is not None:
        repository.fetch(small_files(manifest))
    config = read_config(directory, manifest, plan)
    packings = {entry.packing for entry in plan.parameters if entry.packing is not None}
    require_computable(_quantized(directory, plan, config, device, dtype), packings, compiled=compiled)


@dataclass(frozen=True)
class PackedParameters(Transform):
    """Parameters of quantized formats: computed with as they are stored, or dequantized."""

    directory: Path
    dtype: torch.dtype | None
    """Dtype of activations; None for the plan's."""
    stays_packed: bool

    def shape(self, rank: RankModel) -> RankModel:
        """Make the modules that compute with packed parameters; they are not yet in the model."""
        if not self.stays_packed:
            return rank
        apart = () if rank.attached is None else rank.attached.linear_layers(rank.model)
        quantized = _quantized(self.directory, rank.plan, rank.config, rank.start.device, self.dtype)
        return replace(rank, packed=PackedModules(quantized, parameter_plans(rank.plan), rank.comm, apart))

    def fill(self, rank: RankModel, read: ReadTensors) -> ReadTensors:
        """Give packed parameters to their modules, or dequantize them."""
        if all(entry.packing is None for entry in rank.held_plan.parameters):
            return read
        return lambda rows: unpacked(read(rows), rank.held_plan, rank.start.rank, rank.packed)

    def finish(self, rank: RankModel) -> None:
        """Put the filled modules into the model."""
        if rank.packed is not None:
            rank.packed.finish()


def _quantized(
    directory: Path, plan: Plan, config: Any, device: torch.device, dtype: torch.dtype | None
) -> Quantized:
    settings = quantization_of(config)
    if settings is None:
        raise PlanError(
            f"{directory}: the plan has packed parameters, and config.json has no quantization; "
            "convert the model again"
        )
    return Quantized(settings, device, dtype or getattr(torch, plan.model.dtype))
