"""Whether a format rounds activations, too, by what it finds in each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rounds_activations(settings: Mapping[str, Any]) -> bool:
    """Whether the factor of a token's activations comes from the token.

    Each rank of a row-parallel layer then takes it from its own part of the token.

    Args:
        settings: a ``quantization_config``.
    """
    match settings.get("quant_method"):
        case "fp8" | "mxfp8":
            return bool(settings.get("activation_scheme", "dynamic") == "dynamic")
        case "fbgemm_fp8":
            return True
        case "compressed-tensors":
            groups = settings.get("config_groups") or {}
            return any(_is_dynamic(group) for group in groups.values())
        case _:
            return bool(settings.get("load_in_8bit"))


def _is_dynamic(group: Any) -> bool:
    inputs = group.get("input_activations") if isinstance(group, Mapping) else None
    return isinstance(inputs, Mapping) and bool(inputs.get("dynamic"))
