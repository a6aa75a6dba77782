"""``init_weights`` of a loaded model: each rank gets its parts of the weights of one unsharded model.

The layers of a rank are smaller. Their own initialization would draw equal numbers on all ranks, with the
spread of smaller layers where that depends on the size. So the initialization of the unsharded model is
recorded on meta, and each weight is drawn in full, one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm import agreement
from ..default_modes import in_default_modes
from ..errors import RefusedCallError
from ..format.plan import parameter_plans
from ..loaded import Loaded, loaded
from ..meta.recorded_construction import Construction
from ..parallel.build import stored_tensors
from ..parallel.local_modules import local_view

METHOD = "initialize_weights"
"""The method of transformers that ``init_weights`` and ``post_init`` call."""
_MARK = "_is_hf_initialized"
"""Attribute of modules and tensors that transformers leaves as they are; it has no public name."""


def attach_initializing(model: nn.Module) -> None:
    """Make the method of transformers right for a model of which ranks have parts, in place."""
    if loaded(model).plan.tp > 1 and hasattr(model, METHOD):
        setattr(model, METHOD, partial(draw_parts, model))  # a copy of the model has a copy of this


@dataclass(frozen=True)
class _Marks:
    """Which modules and tensors of a model, by FQN, its initialization leaves as they are."""

    modules: Mapping[str, bool]
    tensors: Mapping[str, bool]

    @classmethod
    def of(cls, model: nn.Module) -> _Marks:
        """Return the marks of a model."""
        tables = model.named_modules(), stored_tensors(model)
        return cls(*({name: bool(getattr(each, _MARK, False)) for name, each in table} for table in tables))

    def put(self, model: nn.Module) -> None:
        """Mark another model in the same way."""
        for table, marks in (
            (model.named_modules(), self.modules),
            (stored_tensors(model), self.tensors),
        ):
            for name, each in table:
                setattr(each, _MARK, marks.get(name, False))


@in_default_modes
@agreement.named_call(METHOD)
@torch.no_grad()
def draw_parts(model: Any) -> None:
    """Draw the weights of a loaded model that have no values yet, in place; every rank calls it."""
    source = loaded(model)
    building = source.building
    marks = _Marks.of(model)
    devices = [building.start.device] if building.start.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for parameter in model.parameters():
            setattr(parameter, _MARK, True)
        getattr(type(model), METHOD)(model)  # the buffers that no file holds
    if not all(marks.tensors.values()):
        seeds = agreement.exchange(building.all_ranks, int(torch.randint(2**62, ())))
        agreement.together(building.all_ranks, lambda: _draw(model, source, marks, seeds[0]))


def _draw(model: Any, source: Loaded, marks: _Marks, seed: int) -> None:
    tensors = dict(stored_tensors(model))
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()) or source.attached is not None:
        raise RefusedCallError(
            f"{METHOD}: the model has adapters, or FSDP has sharded its parameters; call it before that"
        )
    twin: Any = source.building.unsharded_model()
    marks.put(twin)
    construction = Construction(lambda step: seed + step)
    with construction.active():
        getattr(type(twin), METHOD)(twin)
    plans = parameter_plans(source.plan)
    for name, full in stored_tensors(twin):
        tensor, entry = tensors.get(name), plans.get(name)  # tied names have none, and are tied afterwards
        if tensor is not None and entry is not None and construction.is_written(full):
            values = construction.value(full, construction.chain(full))
            tensor.copy_(local_view(entry, values, source.plan.mesh, source.rank))
