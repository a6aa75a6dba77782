"""Models of the zoo as checkpoints on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .measure import random_weight
from .models import build


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
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(random_weight(parameter, generator))
    model.save_pretrained(path)
    return zoo.model_class.from_pretrained(path, dtype=dtype).eval()
