"""Variants of a zoo model: fewer key/value heads than ranks."""

from __future__ import annotations

import inspect

from huggingface_hub.errors import StrictDataclassError

from .models import ZooModel, build
from .shrink import KV_HEADS_ARGUMENT

FEW = 2


def grouped(family: str, model_type: str, heads: int = FEW) -> ZooModel | None:
    """The model with ``heads`` key/value heads; None for a type whose config has none, or refuses it."""
    config = build(family, model_type).config
    names = [n for n in inspect.signature(type(config).__init__).parameters if KV_HEADS_ARGUMENT.fullmatch(n)]
    values = [getattr(config, config.attribute_map.get(n, n), None) for n in names]
    if not any(isinstance(v, int) and v > heads for v in values):
        return None
    try:
        return build(family, model_type, **dict.fromkeys(names, heads))
    except StrictDataclassError:
        return None
