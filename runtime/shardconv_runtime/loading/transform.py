"""A list of transforms with the same four methods makes an unsharded model on meta the model of a rank.

``building.py`` has the list. Each transform first checks the plan, then changes the model while it has no
values, then says how its tensors come from those before, and completes the model once it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.attaching import Attached
from ..comm.collectives import Communicator
from ..comm.mesh import Launch
from ..format.plan import Plan
from ..format.slices import Rows
from ..parallel.packed_modules import PackedModules
from ..pp.stage_model import ArgumentNames, StageModel
from ..pp.stage_processes import StageProcesses

Tensors = Generator[tuple[str, Tensor]]
"""Names and local tensors."""
Stored = Callable[[Attached | None], Tensors]
"""Yields a rank's tensors by their names in the model with the attached adapters."""
ReadTensors = Callable[[Rows], Tensors]
"""Yields a process's local tensors, of those in the rows only these positions of the first dim."""


@dataclass(frozen=True)
class RankModel:
    """The model of a rank while it is built."""

    model: nn.Module
    config: Any
    """The config as it was stored, with its quantization."""
    plan: Plan
    """The plan of all stages, with adapters."""
    held_plan: Plan
    """The plan of the tensors that this process holds, and of the products that it fuses."""
    start: Launch
    """The ranks of the stage of this process."""
    comm: Communicator
    place: StageProcesses | None
    """The place of this process in the pipeline; None without stages."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes in which tensors are loaded, by name; others keep the dtypes in the files."""
    attached: Attached | None = None
    packed: PackedModules | None = None
    """Modules that compute with parameters as they are stored."""
    argument_names: ArgumentNames | None = None
    """The arguments of modules that run on only some stages."""
    stage: StageModel | None = None


class Transform:
    """One thing that loading does to a model; a transform overrides the methods that it needs."""

    def check(self, plan: Plan) -> None:
        """Raise a ``PlanError`` if a plan, with adapters, cannot be loaded so."""

    def shape(self, rank: RankModel) -> RankModel:
        """Change the model on meta."""
        return rank

    def fill(self, rank: RankModel, read: ReadTensors) -> ReadTensors:
        """Return how the tensors of the model are read, given how those before this transform are."""
        return read

    def finish(self, rank: RankModel) -> None:
        """Complete the model, which has its tensors; no message to other ranks."""
