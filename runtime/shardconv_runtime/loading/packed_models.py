"""Models with packed parameters: computed with as they are stored, or dequantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.quantized import quantization_of, without_quantization
from ..comm.collectives import Communicator
from ..comm.mesh import Launch
from ..errors import PlanError
from ..format.plan import parameter_plans
from ..parallel.model_config import read_config
from ..parallel.packed_modules import PackedModules
from ..parallel.quantizers import Quantized, require_computable

if TYPE_CHECKING:
    from .load import Checked, Wanted


def require_packages(found: Checked, start: Launch, wanted: Wanted, *, compiled: bool) -> None:
    """Check that the installed packages can compute with the packed parameters of a model here.

    Args:
        found: the model.
        start: this rank.
        wanted: how to load it.
        compiled: whether it is to be compiled.

    Raises:
        PlanError: they cannot; the message names what to install, and offers to dequantize.
    """
    config = read_config(found.directory, found.manifest, found.plan)
    packings = {entry.packing for entry in found.plan.parameters if entry.packing is not None}
    require_computable(_quantized(found, config, start.device, wanted), packings, compiled=compiled)


def without_packing(
    found: Checked, config: Any, start: Launch, comm: Communicator, wanted: Wanted
) -> tuple[Any, PackedModules | None]:
    """The config of the plain model of a quantized one, and the modules that compute with packed parameters.

    Args:
        found: the model.
        config: its config.
        start: this rank.
        comm: the same.
        wanted: how to load it.

    Returns:
        A config, and modules that are still to be put in place and filled; None if all is dequantized.

    Raises:
        PlanError: see ``require_packages``.
    """
    plain = without_quantization(config)
    if wanted.dequantize:
        return plain, None
    quantized = _quantized(found, config, start.device, wanted)
    return plain, PackedModules(quantized, parameter_plans(found.plan), comm)


def _quantized(found: Checked, config: Any, device: torch.device, wanted: Wanted) -> Quantized:
    settings = quantization_of(config)
    if settings is None:
        raise PlanError(
            f"{found.directory}: the plan has packed parameters, and config.json has no quantization; "
            "convert the model again"
        )
    return Quantized(settings, device, wanted.dtype or getattr(torch, found.plan.model.dtype))
