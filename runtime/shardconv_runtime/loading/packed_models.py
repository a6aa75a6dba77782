"""Models with packed parameters: computed with as they are stored, or dequantized."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.quantized import quantization_of
from ..comm.collectives import Communicator
from ..errors import PlanError
from ..format.manifest import Manifest
from ..format.plan import Plan, parameter_plans
from ..format.small_files import small_files
from ..parallel.model_config import read_config
from ..parallel.packed_modules import PackedModules
from ..parallel.quantizers import Quantized, require_computable

if TYPE_CHECKING:
    from ..hub.fetch import Repository


def require_packages(
    directory: Path,
    manifest: Manifest,
    plan: Plan,
    repository: Repository | None,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    compiled: bool,
) -> None:
    """Check that the installed packages can compute with the packed parameters of a model here.

    Args:
        directory: the converted directory.
        manifest: of it.
        plan: of it.
        repository: of the directory, where it is on the Hub: its small files are downloaded.
        device: where the model will compute.
        dtype: of its activations; None for that of the plan.
        compiled: whether it is to be compiled.

    Raises:
        PlanError: they cannot; the message names what to install, and offers to dequantize.
        SourceError: a file cannot be downloaded.
    """
    if repository is not None:
        repository.fetch(small_files(manifest))
    config = read_config(directory, manifest, plan)
    packings = {entry.packing for entry in plan.parameters if entry.packing is not None}
    require_computable(_quantized(directory, plan, config, device, dtype), packings, compiled=compiled)


def packed_modules(
    directory: Path,
    plan: Plan,
    config: Any,
    device: torch.device,
    comm: Communicator,
    dtype: torch.dtype,
    apart: Collection[str] = (),
) -> PackedModules:
    """The modules that compute with the packed parameters of a rank, still to be put in place and filled.

    Args:
        directory: the converted directory.
        plan: of it.
        config: of the quantized model.
        device: where it will compute.
        comm: this rank.
        dtype: of activations.
        apart: FQNs of layers of adapters.

    Raises:
        PlanError: see ``require_packages``.
    """
    quantized = _quantized(directory, plan, config, device, dtype)
    return PackedModules(quantized, parameter_plans(plan), comm, apart)


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
