"""Models of the zoo as checkpoints on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .measure import random_weight
from .models import build


def draw(parameters: Iterable[nn.Parameter], generator: torch.Generator) -> None:
    """Make parameters random, in place."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(random_weight(parameter, generator))


def save_random(family: str, model_type: str, path: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Write a checkpoint whose parameters are all random; the unsharded model, loaded from it.

    Args:
        family: a key of ``FAMILIES``.
        model_type: a key of that family.
        path: directory to make.
        dtype: of the parameters, on disk and of the model.
    """
    zoo = build(family, model_type)
    model = zoo.model_class._from_config(zoo.config, dtype=dtype).eval()
    draw(model.parameters(), torch.Generator().manual_seed(1))
    model.save_pretrained(path)
    return zoo.model_class.from_pretrained(path, dtype=dtype).eval()
