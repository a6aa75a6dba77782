"""Formats that round activations by what is in each token."""

from __future__ import annotations

from typing import Any

import pytest
from shardconv_runtime.packed.formats import scales_tokens

INPUTS = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, False),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, False),
        ({"quant_method": "gptq", "bits": 4}, False),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": INPUTS}}}, True),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": None}}}, False),
        ({"quant_method": "compressed-tensors"}, False),
    ],
)
def test_by_settings(settings: dict[str, Any], expected: bool) -> None:
    assert scales_tokens(settings) == expected
